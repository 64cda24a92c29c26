"""What all episodes of a collection share: their limits, and the threads that environments run in."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl.rollout.collected import Clock
from agentrl.segments import Row
from agentrl.toolenv.author import ask
from agentrl.types import CutTurns, Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode's length."""

    episode_tokens: int
    """Most tokens of a row, prompt and tool output included."""
    total_tokens: int = 0
    """Most tokens of all rows together, those that a row inherits not counted; 0 for four times ``episode_tokens``."""
    cut_turns: CutTurns = "end"
    """How to treat a turn that the limit of a turn, or of a row, cut off."""
    penalty: int = 0
    """Over so many tokens before a limit the reward falls by up to 1; 0 for no penalty."""

    def penalty_of(self, rows: Sequence[Row], stop: Stop, turn_tokens: int) -> float:
        """Compute the penalty for length of an episode (DAPO's soft overlong punishment).

        It rises linearly from 0 to 1 over the last ``penalty`` tokens that a row, or its longest turn, may have. For an
        episode that ran out of tokens it is 1.

        Source: arXiv 2503.14476, equation 13, where an episode is one turn.
        """
        turns = [len(segment.token_ids) for row in rows for segment in row.segments if segment.trained]
        if not self.penalty or not sum(turns):
            return 0.0
        room = min(turn_tokens - max(turns), self.episode_tokens - max(row.fork + len(row.token_ids) for row in rows))
        # The tool output that no longer fitted is not in the record, which may then end before the limit.
        room = 0 if stop is Stop.TOKEN_LIMIT else room
        return max(0.0, 1 - room / self.penalty)


@dataclass(slots=True, kw_only=True)
class Player:
    """The threads that environments run in, the limits of an episode, and the clock."""

    limits: EpisodeLimits
    """Limits of each episode."""
    threads: ThreadPoolExecutor
    """Threads in which environments step."""
    clock: Clock = field(default_factory=Clock)
    """Time spent so far."""

    async def in_thread(
        self, on_cancel: Callable[[], None], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a blocking call of an environment while other episodes run.

        Args:
            on_cancel: called where the caller is cancelled, to shorten the call.
            function: the blocking function.
            args: its arguments.
            kwargs: its arguments by name.
        """

        def timed() -> tuple[Any, float]:
            began = time.perf_counter()
            # A BaseException, such as from sys.exit() in the environment's own code, would end the process.
            result = ask(function.__qualname__, lambda: function(*args, **kwargs), passing=(Exception,))
            return result, time.perf_counter() - began

        call = self.threads.submit(timed)
        done = asyncio.wrap_future(call)
        try:
            result, seconds = await asyncio.shield(done)
        except asyncio.CancelledError:
            # The caller closes the environment next. That must not happen while a thread is still inside of it, even
            # if the caller is cancelled again.
            call.cancel()
            on_cancel()
            while not done.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
            _ = done.cancelled() or done.exception()  # read, or asyncio would print it
            raise
        self.clock.tools += seconds
        return result
