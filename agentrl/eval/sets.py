"""The sets of tasks of one evaluation: ``--env 'aime24=agentrl/Math-v0?data.test=aime24.jsonl&attempts=32'``."""

import re
from collections.abc import Mapping, Sequence

from agentrl.config import Config, parse_config, parse_env
from agentrl.errors import UsageError

_SETTINGS = ("split", "tasks", "attempts", "temperature")
"""Settings of ``[eval]`` that a set may override; all other options are arguments of its environment."""


def make_sets(config: Config, texts: Sequence[str]) -> dict[str, Config]:
    """Return the settings of each set by its name, which is empty for the only environment of a run.

    Args:
        config: settings of the evaluation.
        texts: ``[NAME=]ID[?key=value&key=value…]`` each; values are TOML, or plain text. Without any, the sets are the
            environments of ``config``.

    Raises:
        UsageError: a text can't be read, or two sets have one name.
    """
    if not texts:
        return {name: _only(config, name, env.id, env.args) for name, env in config.env.played.items()}
    # The dialect that the model was taught is the default of every set.
    dialects = {str(env.args["dialect"]) for env in config.env.played.values() if "dialect" in env.args}
    taught = {"dialect": dialects.pop()} if len(dialects) == 1 else {}
    sets: dict[str, Config] = {}
    for text in texts:
        head, options = parse_env(text)
        chosen, _, env_id = head.rpartition("=")
        name = chosen or short_name(env_id)
        if not env_id or name in sets:
            raise UsageError(
                f"--env {text!r} names no set, or one for the second time: write NAME=ID?key=value&key=value"
            )
        settings = {key: options.pop(key) for key in _SETTINGS if key in options}
        sets[name] = _only(config, name, env_id, taught | options, settings)
    return sets


def short_name(env_id: str) -> str:
    """Return the default name of a set: the last part of its environment's id."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", env_id.rpartition("/")[2])


def _only(
    config: Config, name: str, env_id: str, args: Mapping[str, object], settings: Mapping[str, object] = {}
) -> Config:
    played = {"id": env_id, "args": dict(args)}
    env = {"sandbox": config.env.sandbox, **({"mix": {name: played}} if name else played)}
    data = config.model_dump(mode="json")
    return parse_config({**data, "env": env, "eval": {**data["eval"], **settings}})
