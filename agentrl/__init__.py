"""agentrl: train LLM agents to reason with sandboxed tools.

Importing this imports no torch. The built-in environments are registered with Gymnasium, which from then on also knows
those of installed plugins.
"""

from agentrl.checker import Report, check_env
from agentrl.dialects import register_dialect
from agentrl.env import Episode, ToolEnv
from agentrl.registry import list_envs, make, register, register_builtin, watch_registry
from agentrl.tasks import GeneratedTasks, TaskList, TaskSet
from agentrl.tools import ToolContext, ToolError, tool
from agentrl.types import CutTurn, Message, Task

__all__ = [
    "CutTurn",
    "Episode",
    "GeneratedTasks",
    "Message",
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
    "register",
    "register_dialect",
    "tool",
]
__version__ = "0.1.0"

register_builtin()
watch_registry()
