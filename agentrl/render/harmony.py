"""Harmony, the form of gpt-oss's turns: thinking, answers and calls are messages on channels.

A turn that thinks and answers is ``<|channel|>analysis<|message|>…<|end|>``, ``<|start|>assistant``,
``<|channel|>final<|message|>…<|return|>``; a call names its recipient, and ends with ``<|call|>``.
"""

from collections.abc import Iterable

LEAD = "<|channel|>final<|message|>"
"""Precedes an answer, after the prompt's ``<|start|>assistant``."""
RETURN, CALL = "<|return|>", "<|call|>"
RECIPIENT = " to="
"""Precedes the recipient in the head of a message; only calls have one."""


def read(parts: Iterable[tuple[str, bool]]) -> str:
    """Translate a turn for environments: thinking goes between ``<think>`` and ``</think>``, and the answer stays bare.

    Calls stay as they are, and so does text that can't be read.

    Args:
        parts: the turn's text in order, and whether a part is a control token.
    """
    translated, head, body = "", "", None
    # The empty control token at the end flushes a message that was cut off.
    for text, control in (*parts, ("", True)):
        if control and text == "<|message|>" and body is None:
            body = ""
        elif not control or text not in ("<|end|>", ""):
            head, body = (head + text, None) if body is None else (head, body + text)
        else:
            translated += _message(head.removeprefix("<|start|>assistant"), body, closed=bool(text))
            head, body = "", None
    return translated


def _message(head: str, body: str | None, *, closed: bool) -> str:
    if body is None:
        return head
    if RECIPIENT in head:
        return f"{head}<|message|>{body}"
    if "analysis" in head:
        return f"<think>{body}{'</think>' if closed else ''}"
    return body
