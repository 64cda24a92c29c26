"""Conformance cases, and the outcome of running one."""

from collections.abc import Callable
from dataclasses import dataclass

from agentrl.sandboxes.base import Result, Sandbox, SandboxError


class Violation(Exception):
    """A sandbox did something else than it promised; the message says what was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one case."""

    case: "Case"
    """The case."""
    seen: str
    """Seen instead of the promise; empty where that held."""
    asked: bool = True
    """This back end makes the promise; where not, nothing was run."""

    @property
    def passed(self) -> bool:
        """The promise held, or was not asked for."""
        return not self.seen

    def __str__(self) -> str:
        case, verdict = self.case, "ok" if self.passed else "FAIL"
        return (
            f"{verdict} {case.group}/{case.name}\n  expected: {case.expected}\n  seen: {self.seen}\n  why: {case.why}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One promise and the program, or the steps, that would show it broken."""

    name: str
    """Unique among all cases."""
    group: str
    """Its group, such as ``memory`` or ``transactions``."""
    expected: str
    """The promise in words, for the message of a failure."""
    why: str
    """What goes wrong elsewhere when this does not hold."""
    play: Callable[[Sandbox], None]
    """Runs it; raises :class:`Violation` where the sandbox does not hold."""
    backends: frozenset[str] = frozenset()
    """The back ends that promise it; empty for all of them."""
    unbounded: bool = False
    """The program takes whatever it gets: run it only where the limits are known to hold."""

    def __str__(self) -> str:
        return self.name

    def run(self, sandbox: Sandbox) -> Outcome:
        """Run the case; whatever the sandbox does becomes an outcome."""
        if self.backends and sandbox.backend not in self.backends:
            return Outcome(case=self, seen="", asked=False)
        seen = ""
        try:
            self.play(sandbox)
        except Violation as violation:
            seen = str(violation)
        except SandboxError as error:
            seen = f"a program must not make the infrastructure fail: {type(error).__name__}: {error}"
        except Exception as error:  # an author's back end may raise anything; the other cases still count
            seen = f"the back end raised {type(error).__name__}: {error}"
        return Outcome(case=self, seen=seen)


def shown(result: Result) -> str:
    """Describe a result in one short line."""
    parts = [f"status {result.status}", f"state {result.state}"]
    for name in ("exc_type", "value", "stdout", "stderr", "exit_code", "signal"):
        if (value := getattr(result, name)) not in (None, ""):
            text = repr(value)
            parts.append(f"{name} {text if len(text) < 160 else f'{text[:70]} … {text[-70:]} ({len(text)})'}")
    return ", ".join([*parts, f"wall {result.wall_s:.2f} s", f"cpu {result.cpu_s:.2f} s"])


def must(holds: bool, seen: str) -> None:
    """Raise a violation unless something holds.

    Raises:
        Violation: It does not.
    """
    if not holds:
        raise Violation(seen)
