r"""Plays one sample of an Inspect task with the policy as its model; it knows nothing of agentrl.

``AGENTRL_PROMPT`` is the sample's id, and ``INSPECT_TASK`` names the task, such as ``theory.py`` or
``inspect_evals/theory_of_mind``. The scores go into ``score.json``, which the environment reads.
"""

import json
import os
from pathlib import Path

from inspect_ai import eval as evaluate
from inspect_ai.model import get_model


def main() -> None:
    """Play the sample, and write what its scorers say."""
    # Not "openai/…": that provider asks for what only OpenAI's own server has.
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    model = get_model("openai-api/agentrl/policy", base_url=url, api_key=key)
    (log,) = evaluate(
        os.environ["INSPECT_TASK"],
        model=model,
        sample_id=os.environ["AGENTRL_PROMPT"],
        max_retries=0,
        display="none",
        log_format="json",
    )
    (sample,) = log.samples or [None]
    scores = {name: score.value for name, score in ((sample and sample.scores) or {}).items()}
    fault = (sample and sample.error and sample.error.message) or (log.status != "success" and log.status) or ""
    Path("score.json").write_text(json.dumps({"fault": fault, "scores": scores}), encoding="utf-8")


main()
