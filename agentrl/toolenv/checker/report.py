"""The report of a check: findings, each under a stable code, and what could not be checked."""

from dataclasses import dataclass

from agentrl.toolenv.checker.codes import CODES


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation of the contract."""

    code: str
    """The stable code of its kind; ``codes.CODES`` lists them."""
    message: str
    """The observation, in one sentence."""
    place: str = ""
    """What of the environment it is about, such as ``Trivia.reward``, where the message says itself what to do."""

    @property
    def advice(self) -> str:
        """The remedy, in one sentence; empty where the message says it."""
        return "" if self.place else CODES[self.code].advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of ``check_env``."""

    findings: tuple[Finding, ...]
    """The violations, in the order they were seen."""
    skipped: tuple[str, ...] = ()
    """A sentence for each thing that could not be checked, with the reason."""

    @property
    def ok(self) -> bool:
        """True if there are no findings; what was skipped does not count."""
        return not self.findings

    def row(self) -> dict[str, object]:
        """Plain data for JSON: ``ok``, ``findings`` with code, message and advice, and ``skipped``."""
        found = [{"code": item.code, "message": item.message, "advice": item.advice} for item in self.findings]
        return {"ok": self.ok, "findings": found, "skipped": list(self.skipped)}

    def __str__(self) -> str:
        lines = [f"{finding.code}  {finding.message} {finding.advice}".rstrip() for finding in self.findings]
        return "\n".join([*(lines or ["no findings"]), *(f"not checked: {sentence}" for sentence in self.skipped)])
