"""The report of a check: findings, each under a stable code of ``codes.toml``, and what could not be checked."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of finding."""

    meaning: str
    """What is wrong, in words that hold for every finding of the kind."""
    advice: str
    """The remedy, in one sentence."""


_CODES = tomllib.loads(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8"))
CODES: Mapping[str, Fault] = {code: Fault(**words) for code, words in _CODES.items()}
"""Every kind of finding by its code, such as ``ARL-E003``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation of the contract."""

    code: str
    """The stable code of its kind, a key of ``CODES``."""
    message: str
    """The observation, in one sentence."""
    method: str = ""
    """The environment's method, such as ``Trivia.reward``, where the message says itself what to do."""

    @property
    def advice(self) -> str:
        """The remedy, in one sentence; empty where the message says it."""
        return "" if self.method else CODES[self.code].advice


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
        """Return plain data for JSON: ``ok``, ``findings`` with code, message and advice, and ``skipped``."""
        rows = [{name: getattr(finding, name) for name in ("code", "message", "advice")} for finding in self.findings]
        return {"ok": self.ok, "findings": rows, "skipped": list(self.skipped)}

    def __str__(self) -> str:
        lines = [f"{finding.code}  {finding.message} {finding.advice}".rstrip() for finding in self.findings]
        return "\n".join([*(lines or ["no findings"]), *(f"not checked: {sentence}" for sentence in self.skipped)])
