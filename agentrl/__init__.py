"""agentrl: train LLM agents to reason with sandboxed tools.

Importing this package imports Gymnasium, registers the built-in environments there, and lets Gymnasium find those of
installed plugins. The public names are imported lazily, at first use.
"""

import importlib
from typing import TYPE_CHECKING

from agentrl.envs import register_builtin
from agentrl.toolenv.watch import watch_registry

# For type checkers and editors only; ``_HOMES`` below imports the same names at run time.
if TYPE_CHECKING:
    from agentrl.errors import InfrastructureError
    from agentrl.runs.records import Record, read_episodes
    from agentrl.toolenv.base import Episode, ToolEnv
    from agentrl.toolenv.checker import Report, check_env
    from agentrl.toolenv.dialects import register_dialect
    from agentrl.toolenv.registry import list_envs, make, register
    from agentrl.toolenv.tasks import GeneratedTasks, TaskList, TaskSet
    from agentrl.toolenv.tools.function import ToolContext, ToolError, tool
    from agentrl.toolenv.tools.mcp import mcp_tools
    from agentrl.types import CutTurn, Message, Task

__all__ = [
    "CutTurn",
    "Episode",
    "GeneratedTasks",
    "InfrastructureError",
    "Message",
    "Record",
    "Report",
    "Task",
    "TaskList",
    "TaskSet",
    "ToolContext",
    "ToolEnv",
    "ToolError",
    "check_env",
    "list_envs",
    "make",
    "mcp_tools",
    "read_episodes",
    "register",
    "register_dialect",
    "tool",
]
__version__ = "0.1.0"
_HOMES = {
    "errors": ("InfrastructureError",),
    "runs.records": ("Record", "read_episodes"),
    "toolenv.base": ("Episode", "ToolEnv"),
    "toolenv.checker": ("Report", "check_env"),
    "toolenv.dialects": ("register_dialect",),
    "toolenv.registry": ("list_envs", "make", "register"),
    "toolenv.tasks": ("GeneratedTasks", "TaskList", "TaskSet"),
    "toolenv.tools.function": ("ToolContext", "ToolError", "tool"),
    "toolenv.tools.mcp": ("mcp_tools",),
    "types": ("CutTurn", "Message", "Task"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            # Cached in the module, so that Python does not come here for this name again.
            globals()[name] = member = getattr(importlib.import_module(f"agentrl.{home}"), name)
            return member
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_builtin()
watch_registry()
