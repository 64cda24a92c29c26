"""``agentrl/OpenEnv-v0``: a server of OpenEnv, which says what there is to do and pays for it."""

import functools
import json
from collections.abc import Mapping
from typing import Any, cast

from pydantic import JsonValue

from agentrl.envs.adapters.openenv_session import Session, SessionLost, action_schema
from agentrl.envs.adapters.verdict import GRADED, share, weights
from agentrl.errors import ConfigError, EnvContractError, InfrastructureError
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import GeneratedTasks
from agentrl.toolenv.tools.context import ToolContext
from agentrl.toolenv.tools.function import ToolError, cut_middle
from agentrl.types import Task


class Act:
    """The tool whose arguments are the server's action.

    Args:
        schema: of the action.
        max_chars: characters of an observation.
    """

    name = "act"

    def __init__(self, schema: Mapping[str, Any], max_chars: int) -> None:
        self.description = str(schema.get("description") or "Do something in the environment.")
        self.parameters: Mapping[str, object] = schema
        self._max_chars = max_chars

    def open(self, seed: int) -> None:
        """Do nothing: the environment opens the session."""

    def close(self) -> None:
        """Do nothing: the environment closes the session."""

    def call(self, arguments: Mapping[str, object], ctx: ToolContext) -> str:
        """Take the action, and end the episode where the server says that it is over."""
        if ctx.ended:
            raise ToolError("the episode is over")
        verdict: dict[str, Any] = ctx.state["verdict"]
        try:
            seen = ctx.state["session"].step(arguments)
        except SessionLost as error:
            verdict["lost"] = str(error)
            ctx.end()
            raise
        verdict["rewards"].append(seen.reward)
        if seen.done:
            verdict["done"] = True
            ctx.end()
        return cut_middle(seen.text, self._max_chars)


class OpenEnv(ToolEnv):
    """The environment of an OpenEnv server, spoken to over its WebSocket.

    A task is a seed, even ones for training and odd ones for tests; its prompt is what the server shows after a reset
    with that seed. The tool ``act`` takes the server's action. The return is the sum of what the server pays, as a
    share of the range from ``low`` to ``high``. A sum outside of it is graded 0, as is an episode for which nothing was
    paid, and ``graded`` is 0 then. ``episode.state["verdict"]`` keeps what was paid, step by step.

    Args:
        url: of the server, such as ``http://localhost:8000``.
        split: ``"train"`` or ``"test"``.
        dialect: how tool calls are written.
        max_turns: how often the assistant may speak.
        low: the least that an episode can earn at the server.
        high: the most.
        part: what the reward is called.
        reset: further arguments of the server's reset.
        seconds: wall time of an answer of the server.
        max_chars: characters of an observation; a longer one is cut in the middle.

    Raises:
        ConfigError: ``url`` or the range is missing or wrong.
        InfrastructureError: the server can't be reached.
    """

    instructions = "Use the tool act for every move."
    max_turns = 32

    def __init__(
        self,
        *,
        url: str = "",
        split: str = "train",
        dialect: str | None = None,
        max_turns: int | None = None,
        low: float = 0.0,
        high: float = 1.0,
        part: str = "correct",
        reset: Mapping[str, JsonValue] | None = None,
        seconds: float = 60.0,
        max_chars: int = 4000,
    ) -> None:
        super().__init__(split=split, dialect=dialect, max_turns=max_turns)
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}: name the OpenEnv server, as in url=http://localhost:8000")
        if not low < high:
            raise ConfigError(f"low is {low} and high is {high}: low must be less")
        self.reward_weights = weights({part: 1.0})  # pyright: ignore[reportAttributeAccessIssue]
        self._part, self._range = part, (low, high)
        self._server = url.rstrip("/"), json.dumps(dict(reset or {}), sort_keys=True), seconds
        self.tools = (Act(action_schema(self._server[0], seconds), max_chars),)

    def tasks(self, split: str) -> GeneratedTasks:
        """Return a task for each seed of the split, without end."""
        offset = self.splits.index(split)

        def make(index: int) -> Task:
            seed = 2 * index + offset
            return Task(id="", prompt=_opening(*self._server, seed), data={"seed": seed})

        return GeneratedTasks(split, make)

    def open_episode(self, context: ToolContext) -> None:
        """Begin the server's episode.

        Raises:
            EnvContractError: the server begins it in another way than before.
        """
        session, text = _begin(*self._server, cast(int, context.task.data["seed"]))
        context.state.update(session=session, verdict={"rewards": [], "done": False, "lost": "", "reason": ""})
        if text != context.task.prompt:
            session.close()
            raise EnvContractError(
                f"the OpenEnv server at {self._server[0]} shows something else for the same seed: let its reset follow "
                "the seed, or leave out of its observation what changes"
            )

    def close_episode(self, context: ToolContext) -> None:
        """End the session."""
        context.state["session"].close()

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """Return the sum of what the server paid, as a share of its range."""
        verdict: dict[str, Any] = episode.state["verdict"]
        paid = [float(reward) for reward in verdict["rewards"] if reward is not None]
        earned, verdict["reason"] = share(sum(paid) if paid else None, *self._range)
        return {self._part: earned, GRADED: float(not verdict["reason"])}


def _begin(url: str, reset: str, seconds: float, seed: int) -> tuple[Session, str]:
    """Open a session, reset it, and return it with what it shows."""
    session = Session(url, seconds)
    try:
        seen = session.reset({**json.loads(reset), "seed": seed})
        if seen.done:
            raise InfrastructureError(f"the OpenEnv server at {url} ends the episode of seed {seed} with its reset")
    except BaseException:
        session.close()
        raise
    return session, seen.text


# One reset per task rather than one per question for it: a plan of tasks asks often.
@functools.lru_cache(maxsize=4096)
def _opening(url: str, reset: str, seconds: float, seed: int) -> str:
    session, text = _begin(url, reset, seconds, seed)
    session.close()
    return text
