"""Translates cells into orders for a session, and its answers into results."""

import base64
import errno
import math
import os
from typing import Final, cast

from agentrl.sandboxes.base import Cell, Files, Limits, Result, State, Status
from agentrl.sandboxes.host.capture import Capture
from agentrl.sandboxes.inside import wire

Answer = tuple[wire.Message, tuple[Capture, Capture]]
"""The answer to an order, and what came on standard output and standard error meanwhile."""
_NOTE: Final = 64


def run_order(cell: Cell, seed: int, limits: Limits) -> wire.Message:
    """Make the order that runs a cell.

    Raises:
        ValueError: The code is longer than the limit, or the timeout is not positive.
    """
    if len(cell.code.encode("utf-8", "surrogatepass")) > limits.code_bytes:
        raise ValueError(f"the code is longer than {limits.code_bytes} bytes")
    cpu = limits.cpu_s if cell.timeout is None else cell.timeout
    if not 0 < cpu < math.inf:
        raise ValueError(f"the timeout must be positive and finite, not {cpu!r}")
    return {
        **{"t": "run", "code": cell.code, "cpu": cpu, "wall": cpu * limits.wall_factor, "stdin": cell.stdin},
        **{"seed": seed, "transaction": cell.transaction, "final": cell.final, "files": _encoded(cell.files)},
    }


def _encoded(files: Files) -> dict[str, str]:
    raw = {name: content.encode() if isinstance(content, str) else content for name, content in files.items()}
    return {name: base64.b64encode(content).decode("ascii") for name, content in raw.items()}


def run_result(answer: Answer, queue_s: float, limits: Limits, backend: str) -> Result:
    """Make the result of a cell from the session's answer.

    Raises:
        agentrl.sandboxes.inside.wire.WireError: A text or number is none.
    """
    message, (out, err) = answer
    texts = {key: wire.text(message, key, wire.MAX_CLAIM) for key in ("value", "exc_type", "traceback")}
    long = len(texts["value"] or "") > limits.value_chars or len(texts["traceback"] or "") > limits.traceback_chars
    return Result(
        status=cast(Status, message["status"]),
        stdout=out.text(),
        stderr=err.text(),
        value=_bounded(texts["value"], limits.value_chars),
        exc_type=texts["exc_type"],
        traceback=_bounded(texts["traceback"], limits.traceback_chars),
        exit_code=wire.number(message, "exit_code"),
        signal=wire.number(message, "signal"),
        wall_s=wire.real(message, "wall"),
        cpu_s=wire.real(message, "cpu"),
        queue_s=queue_s,
        max_rss=int(wire.real(message, "rss")),
        truncated=out.truncated or err.truncated or long,
        state=cast(State, message["state"]),
        backend=backend,
    )


def _bounded(claimed: str | None, limit: int) -> str | None:
    # A program that answers for itself may not have cut it; the note of an honest cut comes on top of the limit.
    return claimed if claimed is None or len(claimed) <= limit + _NOTE else wire.cut(claimed, limit)


def file_piece(message: wire.Message, path: str) -> bytes:
    """Return what was read of a file.

    Raises:
        OSError: The program could not read it, or answered with something else.
        TimeoutError: The program did not answer.
    """
    number = wire.number(message, "errno") if "errno" in message else None
    if number is not None:
        # The number is the program's claim: one that this machine does not know becomes an input error.
        number = number if number in errno.errorcode else errno.EIO
        raise OSError(number, os.strerror(number), path)
    content = wire.text(message, "data", wire.MAX_CLAIM) if "data" in message else None
    if content is None:
        raise TimeoutError(f"the program did not hand over {path!r}")
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise OSError(errno.EIO, "the program answered with something else than the file", path) from error
