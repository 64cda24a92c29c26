"""Environments by id, on Gymnasium's own registry.

``gymnasium.register`` and ``gymnasium.make`` work as well; the functions here add errors that suggest the nearest
valid name. Plugins are entry points of the group ``agentrl.envs``: each names a module to import, or a function to
call, that registers ids. They are loaded when an id is looked up that is not registered, by Gymnasium too.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

from agentrl.errors import AgentRLError, ConfigError, EnvContractError, UnknownNameError, UsageError
from agentrl.sandboxes import SandboxError
from agentrl.toolenv.author import ask
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.dialects import DIALECTS

GROUP = "agentrl.envs"
MAX_ID = 200
"""Characters of the longest id, the module before its colon included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A loaded entry point of the group ``agentrl.envs``. Its texts are untrusted: show them escaped."""

    name: str
    """The entry point's name."""
    value: str
    """Its target: ``module`` or ``module:function``."""
    distribution: str
    """Name and version of the distribution that offers it."""
    ids: tuple[str, ...]
    """The ids of its environments, sorted."""
    problem: str
    """Its fault, in words that follow its name; empty where there is none."""


def register(id: str, entry_point: str | Callable[..., ToolEnv], **options: Any) -> None:
    """Register an environment with Gymnasium: ``register("me/Trivia-v0", "my_pkg:Trivia")``.

    Args:
        id: ``namespace/Name-v0``.
        entry_point: the class, a function that makes the environment, or ``"module:Class"``.
        options: passed to ``gymnasium.register``, such as ``kwargs``.
    """
    gymnasium.register(id, entry_point=entry_point, **options)


_loading = threading.RLock()
_found: list[tuple[Plugin, ...]] = []


def plugins() -> tuple[Plugin, ...]:
    """Load every plugin of the group ``agentrl.envs``, once; a broken one has a problem and breaks no other.

    An id that is taken stays with its owner. A plugin that calls this function while it is loaded gets no plugins.
    """
    with _loading:
        if not _found:
            # Set before loading: the lock is re-entrant, and a plugin that asks must not start the loading again.
            _found.append(())
            points = importlib.metadata.entry_points(group=GROUP)
            _found[0] = tuple(map(_loaded, sorted(points, key=lambda point: (point.name, point.value))))
        return _found[0]


def load_plugins() -> None:
    """Load every plugin of the group ``agentrl.envs``; warn of each broken one."""
    for plugin in plugins():
        if plugin.problem:
            _complain(plugin)


@functools.cache
def _complain(plugin: Plugin) -> None:
    warnings.warn(f"plugin {plugin.name!r} ({plugin.value!r}) {plugin.problem}", stacklevel=4)


def list_envs() -> list[str]:
    """Return the ids of all environments that agentrl can play, sorted.

    Gymnasium's own are not among them, nor those that need an extra that is not installed.
    """
    load_plugins()
    lacking = () if importlib.util.find_spec("reasoning_gym") else ("reasoning-gym/",)
    return sorted(
        env_id
        for env_id, spec in gymnasium.registry.items()
        if not _is_gymnasiums(spec) and not env_id.startswith(lacking)
    )


def make(env_id: str, **kwargs: Any) -> ToolEnv:
    """Make an environment.

    An id may begin with a module, which is imported where the rest of the id is not registered yet. Importing a module
    runs it, so whoever chooses the id chooses what runs. An id on the command line is the user's own; an id in a run
    folder that somebody else wrote is not: read ``env`` in its ``config.toml`` before evaluating or resuming it.
    Python's own modules are never imported for an id, since none of them registers an environment.

    Args:
        env_id: a registered id, or ``module:namespace/Name-v0`` to import ``module`` first.
        kwargs: the environment's own arguments.

    Returns:
        The environment itself, without Gymnasium's wrappers; ``gymnasium.make`` gives the wrapped one.

    Raises:
        UnknownNameError: there is no such id.
        UsageError: the environment, or the module before its colon, can't be imported.
        ConfigError: the environment does not take one of the arguments.
        EnvContractError: the id does not lead to a ``ToolEnv``, or the class raised something else.
        agentrl.sandboxes.SandboxError: the environment's sandbox is not available.
    """
    load_plugins()
    registered = _with_module_imported(env_id)
    spec = gymnasium.registry.get(registered)
    if spec is not None and isinstance(spec.entry_point, str):
        # Gymnasium will load it too; here a missing class can be told from an error of its constructor.
        with _imports(env_id, module_of(spec), f"environment {env_id!r} is registered as {spec.entry_point!r}"):
            registration.load_env_creator(spec.entry_point)
    try:
        made = ask(
            f"making {env_id!r}",
            lambda: gymnasium.make(registered, disable_env_checker=True, **kwargs).unwrapped,
            passing=(AgentRLError, SandboxError, gymnasium.error.Error, ModuleNotFoundError, TypeError),
        )
    except ModuleNotFoundError as error:
        raise UsageError(f"environment {env_id!r} needs a module that can't be imported: {error}") from error
    except gymnasium.error.Error as error:
        raise UnknownNameError("environment", env_id, _registered_by(env_id) or list_envs()) from error
    except TypeError as error:
        reason = str(error).partition(" was raised from the environment creator")[0]
        raise ConfigError(f"environment {env_id!r} can't be made with {kwargs}: {reason}") from error
    if not isinstance(made, ToolEnv):
        raise EnvContractError(f"{env_id!r} is no agentrl.ToolEnv but a {type(made).__name__}")
    if not hasattr(made, "_held"):  # the last thing that ToolEnv.__init__ sets
        raise EnvContractError(f"{type(made).__name__}.__init__ does not call super().__init__(split=…, …): call it")
    return made


def _registered_by(env_id: str) -> list[str]:
    """Return the ids, with their module, that the module before the colon of ``env_id`` has registered."""
    module, colon, _ = env_id.rpartition(":")
    return [f"{module}:{id_}" for id_, spec in gymnasium.registry.items() if colon and module_of(spec) == module]


@contextmanager
def _imports(env_id: str, module: str, problem: str) -> Generator[None]:
    """Turn what the import of ``module`` raises into a usage error; ``problem`` begins its sentence."""
    try:
        yield
    except ModuleNotFoundError as error:
        # Python looks in the current folder for `python -m agentrl`, not for an installed command.
        remedy = ": install it, or put its folder into PYTHONPATH" if error.name == _top(module) else ""
        raise UsageError(f"environment {env_id!r} needs a module that can't be imported: {error}{remedy}") from error
    except (Exception, SystemExit) as error:  # somebody's module may raise anything, and may even end the process
        reason = str(error) if isinstance(error, AttributeError) else repr(error)
        raise UsageError(f"{problem}: {reason}") from error


def module_of(spec: EnvSpec) -> str:
    """Return the name of the module that holds an environment's entry point."""
    entry_point = spec.entry_point
    if isinstance(entry_point, str):
        return entry_point.partition(":")[0]
    if inspect.isfunction(entry_point) or inspect.isclass(entry_point):
        return entry_point.__module__
    return type(entry_point).__module__


def _loaded(point: importlib.metadata.EntryPoint) -> Plugin:
    # A copy of the registry tells afterwards what the plugin added, and restores what it overwrote.
    before = dict(gymnasium.registry)
    name, problem = point.value.partition(":")[0].strip(), ""  # not point.module: a malformed value has none
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding environment")  # reported below, with the plugin's name
        try:
            loaded = point.load()
            if callable(loaded):
                loaded()
        except (Exception, SystemExit) as error:  # a plugin may raise anything, and may even end the process
            problem = f"can't be loaded: {error!r}"
    taken = sorted(env_id for env_id, spec in before.items() if not _same(gymnasium.registry.get(env_id), spec))
    gymnasium.registry.update({env_id: before[env_id] for env_id in taken})
    ids = set(gymnasium.registry) - set(before)
    # A module that was imported before registers nothing now: its environments are those in the registry already.
    ids = ids or {env_id for env_id, spec in before.items() if _top(module_of(spec)) == _top(name)}
    if taken and not problem:
        problem = f"wants ids that are taken, and does not get them: {', '.join(map(repr, taken))}"
    elif not ids and not problem and not any(_top(kind.__module__) == _top(name) for kind in DIALECTS.values()):
        facts = vars(sys.modules[name])
        path = facts.get("__file__") or next(iter(facts.get("__path__", ())), "")
        problem = f"registers no environment, as it was loaded from {path!r}: let it call agentrl.register there"
    return Plugin(
        name=point.name,
        value=point.value,
        distribution=f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution",
        ids=tuple(sorted(ids)),
        problem=problem,
    )


def _top(module: str) -> str:
    return module.partition(".")[0]


def _same(spec: EnvSpec | None, other: EnvSpec) -> bool:
    # A function that registers its ids again makes equal specs, which overwrite nothing.
    return spec is other or (
        spec is not None and (spec.entry_point, repr(spec.kwargs)) == (other.entry_point, repr(other.kwargs))
    )


def _with_module_imported(env_id: str) -> str:
    """Import the module of ``env_id`` where that is needed, and return the id without it."""
    if len(env_id) > MAX_ID or not env_id.isprintable():
        raise UnknownNameError("environment", env_id if len(env_id) <= MAX_ID else env_id[:40] + "…", list_envs())
    module, colon, registered = env_id.rpartition(":")
    if not colon or registered in gymnasium.registry:
        return registered
    if not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"{module!r}, before the colon of the id {env_id!r}, is no module: write module:ns/Name-v0")
    if _top(module) in sys.stdlib_module_names:
        raise UsageError(f"{module!r}, before the colon of the id {env_id!r}, is Python's own: name your module there")
    with _imports(env_id, module, f"the module of environment {env_id!r} can't be imported"):
        importlib.import_module(module)
    return registered


def _is_gymnasiums(spec: EnvSpec) -> bool:
    # Environments that Gymnasium moved elsewhere stay in its registry, under shimmy or as a function that explains the
    # move. Those without an entry point exist as vector environments only, which agentrl has none of.
    return spec.entry_point is None or _top(module_of(spec)) in ("gymnasium", "shimmy")
