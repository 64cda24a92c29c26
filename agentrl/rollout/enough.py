"""Wait until enough groups are complete."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def wait_for_enough(
    enough: int | None, playing: Sequence[asyncio.Task[T]], leaving: set[asyncio.Task[T]], complete: Callable[[T], bool]
) -> tuple[Sequence[T], int]:
    """Wait until ``enough`` groups are complete, and cancel the others.

    Args:
        enough: how many groups; None waits for all.
        playing: a task for each group.
        leaving: receives cancelled tasks and holds them until they have ended. They are not waited for, since a slow
            tool may delay them; their environments are closed afterwards.
        complete: returns True for a result whose group lost no episode.

    Returns:
        The results of the tasks that have ended, in order, and the number of cancelled groups.
    """
    count = 0
    try:
        for task in asyncio.as_completed(playing):
            count += complete(await task)
            if count == enough:
                break
        late = [task for task in playing if not task.done()]
        ended = [task.result() for task in playing if task.done()]
    except BaseException as error:
        for task in playing:
            task.cancel()
        await asyncio.wait(playing)
        # One bug in an environment breaks many episodes alike, and the first error says enough. The others are read
        # too: asyncio prints errors that nobody reads.
        for task in playing:
            _ = task.cancelled() or task.exception()
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        raise cause from cause.__cause__
    for task in late:
        task.cancel()
        leaving.add(task)
        task.add_done_callback(leaving.discard)
    return ended, len(late)
