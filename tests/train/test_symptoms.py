"""Runs that are made to fail, each in its way: progress, rows and report show why."""

import html
import re
from pathlib import Path

import pytest

from agentrl.runs.folder import read_jsonl
from agentrl.runs.symptoms import SYMPTOMS

from ..forked import Server
from .conftest import SHAPED, Train, setting

OWN = f"""{SHAPED}
from itertools import count
from agentrl import InfrastructureError
from agentrl.algos.losses import LossInputs, LossOut, PolicyLoss
from agentrl.toolenv.tools.function import tool

@tool
def python(code: str) -> str:
    "Run a program."
    raise ValueError("the server is gone")

class Broken(Shaped):
    def __init__(self, **args):
        super().__init__(**args)
        self.tools = (python,)

calls = count()

class Faulty(Shaped):
    def respond(self, episode):
        if next(calls) % 3 == 0:
            raise InfrastructureError("the server is overloaded")
        return ()

class Same(Shaped):
    def __init__(self, *, value=0.0, **args):
        super().__init__(**args)
        self.value = value

    def reward(self, episode):
        return {{"correct": self.value}}

for env in (Broken, Faulty, Same):
    gymnasium.register(f"test/{{env.__name__}}-v0", entry_point=env)

scale = 1.0

@PolicyLoss
def forgetting(inputs: LossInputs) -> LossOut:
    return LossOut(inputs.grad_only.sum(), {{}})

@PolicyLoss
def growing(inputs: LossInputs) -> LossOut:
    global scale
    scale *= 8
    return LossOut(-scale * (inputs.advantages * inputs.grad_only * inputs.factors).sum(), {{}})
"""
SAME = ("env.id='own:test/Same-v0'", "env.args.max_turns=1")
NARROW = ("algo.loss=ppo_clip", "algo.loss_options.clip_low=1e-6", "algo.loss_options.clip_high=1e-6")
SHORT = ("optim.steps=10", "save.every=0", "eval.every=0", "eval.tasks=1")


def warnings(text: str) -> dict[str, str]:
    """By a symptom's name the sentence that a run's progress has of it; no symptom of these runs comes twice."""
    lines = re.findall(r"^warning: step \d+: (.*)$", text, flags=re.M)
    sentences = [(s.name, line) for line in lines for s in SYMPTOMS if line.endswith(f": {s.cause}; {s.remedy}")]
    assert len(dict(sentences)) == len(sentences) == len(lines)
    return dict(sentences)


# Processors round differently, so each case is to hold whatever is sampled.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "settings"),
    [
        ("silent unsolved episodes_cut", (*SAME, "rollout.tasks=8")),
        # The baseline of ogb has 1e-8 in its denominator, so that its advantages are not 0.
        ("silent", (*SAME, "env.args.value=0.3", "algo.advantage=ogb")),
        ("entropy_rising turns_cut", ("algo.entropy_coef=10",)),
        ("ratios_off", ("algo.loss='own:forgetting'", "optim.epochs=8")),
        ("entropy_gone", ("rollout.temperature=1e-3",)),
        ("turns_cut tools_dropped", ("optim.lr=0.1",)),
        ("turns_cut", ("rollout.turn_tokens=4",)),
        ("tools_failing", ("env.id='own:test/Broken-v0'",)),
        ("clipped", (*NARROW, "optim.epochs=8")),
        ("weights_still", ("optim.lr=1e-9",)),
        ("weights_still", ("optim.max_grad_norm=1e-15",)),
        ("gradient_rising", ("algo.loss='own:growing'",)),
        ("faulty", ("env.id='own:test/Faulty-v0'", "rollout.max_fault_rate=0.9")),
    ],
)
def test_a_run_that_fails_shows_why(train: Train, tmp_path: Path, names: str, settings: tuple[str, ...]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    shown, run = warnings(train("it", *SHORT, *settings).done().err), tmp_path / "runs" / "it"
    assert set(names.split()) <= set(shown)
    assert {name for row in read_jsonl(run / "metrics.jsonl") for name in row.get("symptoms", ())} == set(shown)
    report = html.unescape((run / "report.html").read_text())
    assert not [sentence for sentence in shown.values() if sentence not in report]


@pytest.mark.slow
def test_a_resumed_run_shows_what_an_undisturbed_one_would(train: Train, server: Server, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    shown = [warnings(train("it", *SHORT, *SAME, "optim.steps=4").done().err)]
    for steps in (6, 7):
        resumed = server.start(tmp_path, "train", "--resume", "runs/it", *setting(f"optim.steps={steps}"))
        shown.append(warnings(resumed.done().err))
    assert ["silent" in sentences for sentences in shown] == [False, True, False]
    rows = read_jsonl(tmp_path / "runs" / "it" / "metrics.jsonl")
    assert ["silent" in row.get("symptoms", ()) for row in rows] == [False] * 4 + [True] * 3
