"""A launcher: ``python bound.py PARENT SIGNAL WORD …`` becomes ``python WORD …``, a process that ends with its parent.

A process with threads must not run Python between fork and exec, as ``preexec_fn`` does: the child may wait for a lock
that a thread of its parent held. This launcher makes the calls after exec, as the only thread of a new process. It
imports nothing of agentrl, whose imports take time.
"""

import os
import runpy
import sys


def main(parent: str, number: str, *words: str) -> None:
    """Bind this process to its parent, then become Python with ``words``: the kernel's promise survives exec."""
    zygote = runpy.run_path(os.path.join(os.path.dirname(__file__), "zygote.py"))
    zygote["end_with_parent"](int(parent), int(number))
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(*sys.argv[1:])
