"""What a check says: findings, each under a code that stays, and what could not be checked."""

from dataclasses import dataclass

from agentrl.checker.codes import CODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One way in which the environment breaks its contract."""

    code: str
    """Names the kind of finding, for ever; ``codes.CODES`` lists them."""
    message: str
    """What was seen, in one sentence."""

    @property
    def advice(self) -> str:
        """What to do about it, in one sentence."""
        return CODES[self.code].advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What ``check_env`` found."""

    findings: tuple[Finding, ...]
    """What breaks the contract, in the order it was seen."""
    skipped: tuple[str, ...] = ()
    """What could not be checked and why, a sentence each."""

    @property
    def ok(self) -> bool:
        """Whether nothing breaks the contract, as far as it was checked."""
        return not self.findings

    def row(self) -> dict[str, object]:
        """The report as JSON can write it: ``ok``, ``findings`` with code, message and advice, and ``skipped``."""
        found = [{"code": item.code, "message": item.message, "advice": item.advice} for item in self.findings]
        return {"ok": self.ok, "findings": found, "skipped": list(self.skipped)}

    def __str__(self) -> str:
        lines = [f"{finding.code}  {finding.message} {finding.advice}" for finding in self.findings]
        return "\n".join([*(lines or ["no findings"]), *(f"not checked: {sentence}" for sentence in self.skipped)])
