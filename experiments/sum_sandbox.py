"""A sandbox that answers ``print(12 * 34)`` itself, for the runs of PLAN.md.

A call of the tool costs the local sandbox more than the model's turn costs, and nearly all calls of Arithmetic are such
sums. Results are equal to those of the local sandbox, character by character; all other programs run in it.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

from agentrl.sandboxes import Counters, Files, Health, Limits, Result, Sandbox, Session
from agentrl.sandboxes.base import MIB
from agentrl.sandboxes.host.local import LocalSandbox

BACKEND = "sum_sandbox:SumSandbox"
"""Its name as the setting ``env.sandbox``."""
_NUMBER = "(?:0|[1-9][0-9]{0,11})"
_PRINTED_SUM = re.compile(rf"print\((-?{_NUMBER}(?: ?[-+*] ?{_NUMBER}){{0,3}})\)")


def printed(code: str) -> str | None:
    """Return what a program prints that only prints a sum of products of written numbers; None for any other."""
    match = _PRINTED_SUM.fullmatch(code)
    if match is None:
        return None
    terms = re.findall(r"([-+]?)([0-9*]+)", match[1].replace(" ", ""))
    return str(sum((-1 if sign == "-" else 1) * math.prod(map(int, term.split("*"))) for sign, term in terms)) + "\n"


class _SumSession(Session):
    """A session that begins in the sandbox with the first program that is no sum."""

    def __init__(self, begin: Callable[[], Session], backend: str) -> None:
        self._begin, self._backend = begin, backend
        self._session: Session | None = None
        self._answered: list[str] = []

    def run(self, code: str, timeout: float | None = None, transaction: bool = True) -> Result:
        text = printed(code) if self._session is None else None
        if text is None:
            return self._begun().run(code, timeout, transaction)
        self._answered.append(code)
        return Result(status="ok", stdout=text, backend=self._backend)

    def _begun(self) -> Session:
        if self._session is None:
            self._session = self._begin()
            # Tracebacks number the cells, so the session must have had those that were answered without it.
            for code in self._answered:
                self._session.run(code)
        return self._session

    def replay(self) -> Session:
        return self._begun().replay()

    def fork(self) -> Session:
        return self._begun().fork()

    def read_file(self, path: str, max_bytes: int = MIB) -> bytes:
        return self._begun().read_file(path, max_bytes)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


class SumSandbox(Sandbox):
    """The local sandbox, whose sessions answer sums themselves; its arguments are those of the local one."""

    def __init__(self, limits: Limits, *, ready: int | None = None, packages: Sequence[str] = ()) -> None:
        self._local = LocalSandbox(limits, ready=ready, packages=packages)
        self.backend, self.version, self.limits = self._local.backend, self._local.version, self._local.limits

    def run(
        self, code: str, *, timeout: float | None = None, stdin: str = "", files: Files | None = None, seed: int = 0
    ) -> Result:
        """Run one program in the local sandbox."""
        return self._local.run(code, timeout=timeout, stdin=stdin, files=files, seed=seed)

    def session(self, seed: int = 0) -> Session:
        """Return a session that begins later."""
        return _SumSession(partial(self._local.session, seed), self.backend)

    def counters(self) -> Counters:
        """Return what the local sandbox has done."""
        return self._local.counters()

    def health(self) -> Health:
        """Return the state of the local sandbox."""
        return self._local.health()

    def close(self) -> None:
        """Close the local sandbox."""
        self._local.close()
