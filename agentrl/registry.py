"""Environments by id, on Gymnasium's own registry.

``gymnasium.register`` and ``gymnasium.make`` work just as well; these add errors that name the nearest valid choice.
Other distributions offer theirs under the entry-point group ``agentrl.envs``: each entry point is a module to import,
or a function to call, that registers ids.
"""

import functools
import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium

from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, EnvContractError, UnknownNameError, UsageError

GROUP = "agentrl.envs"


def register(id: str, entry_point: str | Callable[..., ToolEnv], **options: Any) -> None:
    """Register an environment with Gymnasium: ``register("me/Trivia-v0", "my_pkg:Trivia")``.

    Args:
        id: ``namespace/Name-v0``.
        entry_point: the class, a function that makes the environment, or ``"module:Class"``.
        options: passed to ``gymnasium.register``, such as ``kwargs``.
    """
    gymnasium.register(id, entry_point=entry_point, **options)


def register_builtin() -> None:
    """Register the environments that come with agentrl. Calling it again changes nothing."""
    builtin = {
        "agentrl/Arithmetic-v0": "agentrl.envs.arithmetic:Arithmetic",
        "agentrl/Code-v0": "agentrl.envs.code:Code",
    }
    for env_id, entry_point in builtin.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(env_id, entry_point=entry_point)


@functools.cache
def load_plugins() -> None:
    """Load every plugin of the group ``agentrl.envs``; a broken one is named in a warning and breaks nobody else."""
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            loaded = point.load()
            if callable(loaded):
                loaded()
        except Exception as error:  # a plugin may raise anything
            warnings.warn(f"plugin {point.name!r} ({point.value}) can't be loaded: {error!r}", stacklevel=2)


def list_envs() -> list[str]:
    """The ids of all environments that agentrl can play, sorted: everything but Gymnasium's own."""
    load_plugins()
    return sorted(env_id for env_id, spec in gymnasium.registry.items() if not _is_gymnasiums(spec.entry_point))


def make(env_id: str, **kwargs: Any) -> ToolEnv:
    """Make an environment.

    Args:
        env_id: a registered id, or ``module:namespace/Name-v0`` to import ``module`` first.
        kwargs: the environment's own arguments.

    Returns:
        The environment itself, without Gymnasium's wrappers; ``gymnasium.make`` gives the wrapped one.

    Raises:
        UnknownNameError: there is no such id.
        UsageError: the environment, or the module before its colon, needs a module that is not there.
        ConfigError: the environment does not take one of the arguments.
        EnvContractError: the id does not lead to a ``ToolEnv``.
    """
    load_plugins()
    try:
        made = gymnasium.make(env_id, disable_env_checker=True, **kwargs).unwrapped
    except ModuleNotFoundError as error:
        raise UsageError(f"environment {env_id!r} needs a module that can't be imported: {error}") from error
    except gymnasium.error.Error as error:
        raise UnknownNameError("environment", env_id, list_envs()) from error
    except TypeError as error:
        raise ConfigError(f"environment {env_id!r} can't be made with {kwargs}: {error}") from error
    if not isinstance(made, ToolEnv):
        raise EnvContractError(f"{env_id!r} is no agentrl.ToolEnv but a {type(made).__name__}")
    return made


def _is_gymnasiums(entry_point: object) -> bool:
    module = entry_point if isinstance(entry_point, str) else entry_point.__module__
    # What Gymnasium moved elsewhere stays in its registry, under shimmy or as a function that explains the move.
    return module.startswith(("gymnasium.", "shimmy."))
