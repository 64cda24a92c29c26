"""Tasks and rewards of a task set of verifiers (v1), in the interpreter that has it: see ``agentrl.processes.pool``.

Nothing of agentrl can be imported here. Nothing of verifiers is imported before ``warm``.
"""

import asyncio
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

MAX_BYTES = 16 << 30
"""Address space of a worker; most of it is never touched."""
CONTROL = {"do": "ping"}
TASKS: list[Any] = []
NEEDS: list[str] = []
"""What the tasks need beside a conversation."""


def warm(taskset_id: str, config: str, limit: str) -> None:
    """Load the tasks; every worker inherits them."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    settings = vf.taskset_config_type(taskset_id).model_validate({"id": taskset_id, **json.loads(config)})
    taskset = vf.load_taskset(settings)
    TASKS.extend(taskset.take(int(limit)))
    NEEDS.extend(sorted({*_needs_of_set(vf, taskset_id, taskset), *(n for task in TASKS for n in _needs(vf, task))}))


def reply(*, do: str, **request: Any) -> object:
    """Answer ``ping``, ``tasks`` or ``score``."""
    return {"ping": lambda: True, "tasks": _tasks, "score": _score}[do](**request)


def _tasks() -> dict[str, object]:
    rows = [
        {"key": task.key, "system": task.data.system_prompt or "", "prompt": task.data.prompt_text} for task in TASKS
    ]
    weights = {fn.__name__: getattr(fn, "_vf_weight", 1.0) for fn in TASKS[0].hooks("reward")} if TASKS else {}
    needs = [*NEEDS]
    # The names of several parts are in no signature: only a verdict shows them.
    if TASKS and _score(index=0, answer="").get("parts", weights).keys() != weights.keys():
        needs.append("parts that a reward names as it grades")
    return {"tasks": rows, "needs": needs, "weights": weights}


def _score(*, index: int, answer: str) -> dict[str, Any]:
    """Grade an answer to a task: the score of each part, or why there is none; a fault where it is not the answer's."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from verifiers.v1.graph import MessageNode  # pyright: ignore[reportMissingImports]
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask  # pyright: ignore[reportMissingImports]

    task = TASKS[index]
    seeded = TraceTask(type=type(task).__name__, data=task.data)
    trace = Trace(task=seeded, agent=AgentInfo(config=vf.AgentConfig()))
    opening = [vf.SystemMessage(content=task.data.system_prompt)] if task.data.system_prompt else []
    messages = [*opening, vf.UserMessage(content=task.data.prompt_text), vf.AssistantMessage(content=answer)]
    for number, message in enumerate(messages):
        parent = number - 1 if number else None
        trace.nodes.append(MessageNode(parent=parent, message=message, sampled=number == len(messages) - 1))
    try:
        asyncio.run(task.score(trace))
    except vf.TaskError as error:  # the task's own code has raised, perhaps at what the agent wrote
        return {"failed": str(error)}
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {error}"}
    return {"parts": {name: part and part.score for name, part in trace.rewards.items()}}


def _needs_of_set(vf: Any, taskset_id: str, taskset: Any) -> Iterator[str]:
    from verifiers.v1.utils.loaders import default_harness_id  # pyright: ignore[reportMissingImports]

    if vf.environment_class(taskset_id) is not vf.SingleAgentEnv:
        yield "an Env of its own"
    if default_harness_id(taskset_id) == taskset_id:
        yield "a harness of its own"
    if type(taskset).toolsets(taskset.config):
        yield "tools"


def _needs(vf: Any, task: Any) -> Iterator[str]:
    """Yield what a task needs that a lifted one has not."""
    data = task.data
    if any(_wants_runtime(fn) for fn in task.hooks("reward")):
        yield "a runtime for its rewards"
    for hook in ("setup", "finalize", "stage_verifier", "runtime_env"):
        if getattr(type(task), hook) is not getattr(vf.Task, hook):
            yield f"a runtime for {hook}"
    if task.NEEDS_CONTAINER or data.image or data.workdir or data.skills or data.artifacts:
        yield "a container"
    if type(task).toolsets(task.config):
        yield "tools"
    if task.config.judges:
        yield "judges"
    if task.hooks("stop"):
        yield "stop conditions"
    if not _is_one_text(data.prompt):
        yield "a conversation"


def _wants_runtime(fn: Any) -> bool:
    parameter = inspect.signature(fn).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _is_one_text(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    single = isinstance(prompt, Sequence) and len(prompt) == 1
    return single and prompt[0].role == "user" and isinstance(prompt[0].content, str)
