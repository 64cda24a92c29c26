"""The codes of findings, each with meaning and remedy, as ``codes.toml`` lists them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of finding."""

    meaning: str
    """The fault, in words that hold for every finding of the kind."""
    advice: str
    """The remedy, in one sentence."""


_LISTED = Path(__file__).with_name("codes.toml").read_text(encoding="utf-8")
CODES: Mapping[str, Code] = {name: Code(**words) for name, words in tomllib.loads(_LISTED).items()}
"""Every kind of finding by its code, such as ``ARL-E003``."""
