"""The decode step in C: a decoder's new tokens of many rows, several times as fast as through PyTorch.

``step.c`` is compiled by the machine's own compiler when an engine is first made (``build``), takes its weights from a
transformers model (``weights``), and is checked against that model's own forward pass (``step``). Where one of these
can't be, :class:`Unavailable` says why, and the engine computes by PyTorch.
"""


class Unavailable(Exception):
    """The step in C can't be had; the message says why, and where something can be done, what."""
