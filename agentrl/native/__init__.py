"""C code for a CPU: a decoder's step (``step.c``), and attention over packed rows with its gradients (``attention.c``).

It is compiled by the machine's own compiler when it is first needed (``build``). Where it can't be had, or does not
compute what is asked for, :class:`Unavailable` says why, and PyTorch computes instead.
"""


class Unavailable(Exception):
    """The code in C can't be had; the message says why, and where something can be done, what."""
