"""``agentrl list``: the environments and their properties, without playing any of them."""

import contextlib
import inspect
import sys
import warnings
from collections.abc import Generator, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

import gymnasium

from agentrl.config import presets
from agentrl.errors import UsageError
from agentrl.runs.progress import Display
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.registry import list_envs, make, module_of, plugins
from agentrl.toolenv.tools.function import Tool


def overview() -> dict[str, Any]:
    """List environments, broken plugins and presets, as plain data for JSON.

    An environment that can't be made has a problem, and stops no other.
    """
    with _quiet():
        environments = {env_id: _entry(env_id) for env_id in list_envs()}
    broken = [asdict(plugin) for plugin in plugins() if plugin.problem]
    return {"environments": environments, "broken_plugins": broken, "presets": list(presets())}


def show_overview(facts: Mapping[str, Any], display: Display) -> None:
    """Print the result of ``overview``: a line per environment, grouped by namespace, and those of the others."""
    environments: Mapping[str, Mapping[str, Any]] = facts["environments"]
    # Limited: one overlong id must not push every other line's text to the right.
    width = min(max(map(len, environments), default=0), 50)
    for namespace, group in groupby(environments.values(), key=lambda entry: entry["id"].rpartition("/")[0]):
        members = list(group)
        homes = ", ".join(sorted({entry["distribution"] for entry in members}))
        display.say(f"environments {namespace or 'without a namespace'} (from {homes})", "bold")
        for entry in members:
            display.say(f"  {entry['id']:<{width}}  {_summary(entry)}", "red" if entry["problem"] else "")
    if facts["broken_plugins"]:
        display.say("broken plugins", "bold")
    for plugin in facts["broken_plugins"]:
        display.say("  {name!r} of {distribution}: {value!r} {problem}".format(**plugin), "red")
    display.say("presets", "bold")
    for name in facts["presets"]:
        display.say(f"  {name}")


def details(env_id: str, arguments: Mapping[str, Any]) -> dict[str, object]:
    """Describe one environment, made with these arguments, without playing it, as plain data for JSON.

    Raises:
        UsageError: there is no such environment, or it can't be made here; the message says why.
    """
    with _quiet():
        try:
            env = make(env_id, **arguments)
        except UsageError as error:
            if env_id in presets():
                raise UsageError(
                    f"{env_id!r} is a preset, no environment: agentrl config {env_id} prints it"
                ) from error
            raise
        except (Exception, SystemExit) as error:  # an environment's code may raise anything, which is then the cause
            raise UsageError(f"the environment {env_id!r} is broken: {error.__cause__ or error!r}") from error
        with contextlib.closing(env):
            return _details(env)


def show_details(facts: Mapping[str, object], display: Display) -> None:
    """Print the result of ``details``, a line for each fact."""
    for name, value in facts.items():
        rows = value if isinstance(value, list) else [_line(value)]
        for row in rows or [""]:
            display.say(f"{name.replace('_', ' '):<14}{row or 'none'}", "bold" if name == "id" else "")


def _details(env: ToolEnv) -> dict[str, object]:
    spec, kind = env.spec, type(env)
    assert spec is not None
    parameters = inspect.signature(kind).parameters.values()
    return {
        "id": spec.id,
        "description": inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " "),
        "distribution": _home(spec.id),
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "arguments": {each.name: repr(each.default) for each in parameters if each.default is not each.empty},
        "set": {name: repr(value) for name, value in spec.kwargs.items()},
        "dialect": env.dialect.name,
        "max_turns": env.max_turns,
        **_game(env),
        "tools": [f"{_signature(tool)}: {tool.description}" for tool in env.tools],
    }


def _line(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name}: {item:g}" if isinstance(item, float) else f"{name}={item}" for name, item in value.items()
        )
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _entry(env_id: str) -> dict[str, Any]:
    about: dict[str, Any] = {"id": env_id, "distribution": _home(env_id)}
    about |= {"tools": (), "splits": (), "reward": {}, "gold": False, "problem": ""}
    try:
        with contextlib.closing(make(env_id)) as env:
            return {**about, **_game(env), "tools": tuple(tool.name for tool in env.tools)}
    except UsageError as error:
        return {**about, "problem": f"not available: {error}"}
    except (Exception, SystemExit) as error:  # an environment's code may raise anything
        return {**about, "problem": f"broken: {error.__cause__ or error!r}"}


def _game(env: ToolEnv) -> dict[str, object]:
    # Calling gold would need a task, and making tasks may take long.
    has_gold = type(env).gold is not ToolEnv.gold
    return {"splits": tuple(env.splits), "reward": dict(env.reward_weights), "gold": has_gold}


def _home(env_id: str) -> str:
    for plugin in plugins():
        if env_id in plugin.ids:
            return plugin.distribution
    return module_of(gymnasium.registry[env_id]).partition(".")[0]


def _summary(entry: Mapping[str, Any]) -> str:
    if entry["problem"]:
        return entry["problem"]
    tools = f"tools {_line(entry['tools'])}" if entry["tools"] else "no tools"
    gold = "gold" if entry["gold"] else "no gold"
    return f"{tools}; splits {_line(entry['splits'])}; reward {_line(entry['reward'])}; {gold}"


def _signature(tool: Tool) -> str:
    properties = tool.parameters.get("properties")
    names = [str(name) for name in properties] if isinstance(properties, Mapping) else []
    return f"{tool.name}({', '.join(names)})"


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keep prints and warnings of environments' code out of the list, which may be JSON."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
