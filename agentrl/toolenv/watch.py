"""A wrapper of Gymnasium's registry that loads the plugins before it reports an id as missing."""

from collections import UserDict
from typing import Any

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec


class _Registry(UserDict[str, EnvSpec]):
    # Not left to UserDict: from Python 3.12 on its get asks ``in`` first and never comes to __missing__.
    def get(self, key: str, default: EnvSpec | None = None) -> EnvSpec | None:  # pyright: ignore
        """Look up an id's specification, as Gymnasium does."""
        return (self.data if key in self.data else self._with_plugins()).get(key, default)

    def __missing__(self, key: str) -> EnvSpec:
        return self._with_plugins()[key]

    def _with_plugins(self) -> dict[str, EnvSpec]:
        # Imported late: ``import agentrl`` loads this module and is to stay quick.
        from agentrl.toolenv.registry import load_plugins

        load_plugins()
        return self.data


def watch_registry() -> None:
    """Let Gymnasium find the plugins' environments. Calling this again changes nothing."""
    if not isinstance(gymnasium.registry, _Registry):
        watched: Any = _Registry()
        watched.data = gymnasium.registry  # the same dict: whoever holds it already sees later registrations
        # Each of these modules has bound the registry to a name of its own.
        for module in (gymnasium, gymnasium.envs, registration):
            vars(module)["registry"] = watched
