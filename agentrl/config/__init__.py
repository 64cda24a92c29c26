"""The settings of a run: typed, frozen, from a TOML file and ``--set section.key=value``.

An unknown key is an error that names the nearest one.
"""

from agentrl.config.reading import load_config, parse_config, parse_env, parse_toml, presets, with_overrides
from agentrl.config.settings import (
    AlgoSettings,
    Config,
    EvalSettings,
    OptimSettings,
    RolloutSettings,
    RunSettings,
)

__all__ = [
    "AlgoSettings",
    "Config",
    "EvalSettings",
    "OptimSettings",
    "RolloutSettings",
    "RunSettings",
    "load_config",
    "parse_config",
    "parse_env",
    "parse_toml",
    "presets",
    "with_overrides",
]
