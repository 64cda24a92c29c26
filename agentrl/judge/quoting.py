"""Quote texts of somebody who would like to be judged well, so that they stay quotations.

A quotation stands between two lines with a fence, which is a hash of all that is quoted: whoever writes a text can't
know the fence of the request that will quote it. Not covered: a model that follows orders although they are quoted.
"""

import hashlib
import re
import unicodedata
from collections.abc import Mapping

from agentrl.toolenv.tools.function import cut_middle

_FENCE = 16
"""Hexadecimal digits of a fence."""
_ANGLE = re.compile(r"[<＜﹤](?![\s=])")  # noqa: RUF001 a tokenizer may read the wide ones as the first
_BRACKETED = re.compile(r"\[(?=/?[A-Z_]{3,}\])")
_HIDDEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
"""Unicode's categories of characters that nobody sees or that begin lines."""
NOTE = "In quotations, control characters are replaced, and ‹ stands for an angle bracket."  # noqa: RUF001


def plain(text: str, longest: int) -> str:
    """Return a text in which nothing is read as a control token, such as ``<|im_end|>``, ``</s>`` or ``[INST]``.

    Args:
        text: somebody's text.
        longest: most characters, at least 60; of a longer one the middle is left out.
    """
    shown = "".join(
        "\ufffd" if char not in "\n\t" and unicodedata.category(char) in _HIDDEN else char
        for char in cut_middle(text.replace("\r\n", "\n"), longest)
    )
    return _BRACKETED.sub("⟦", _ANGLE.sub("‹", shown))  # noqa: RUF001


def quoted(texts: Mapping[str, str], longest: int) -> tuple[str, str]:
    """Quote texts in one message.

    Args:
        texts: each text, by a label of ours.
        longest: most characters of a text.

    Returns:
        The fence, and the quotations.
    """
    shown = {label: plain(text, longest) for label, text in texts.items()}
    fence = hashlib.sha256(repr(shown).encode()).hexdigest()[:_FENCE]
    parts = [f"BEGIN {label} {fence}\n{text}\nEND {label} {fence}" for label, text in shown.items()]
    return fence, "\n\n".join(parts)
