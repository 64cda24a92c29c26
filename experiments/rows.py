"""Raw rows of experiments: a JSON object a line for each finished unit, with the commit that it was made with."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class RowFile:
    """A file of rows, to which units are added as they finish; one that has a row is not done again.

    Args:
        path: of the file, which need not be there. A last line that a kill cut off is taken away.
        commit: of the code, named in each new row.
    """

    def __init__(self, path: Path, commit: str) -> None:
        self._path, self._commit = path, commit
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]

    def has(self, unit: Mapping[str, Any]) -> bool:
        """Tell whether a unit, named by its settings, has a row."""
        return any(row["unit"] == unit for row in self.rows)

    def add(self, unit: Mapping[str, Any], **found: Any) -> None:
        """Append the row of a unit."""
        row = {"unit": dict(unit), "commit": self._commit, **found}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self.rows.append(row)


def commit_of(root: Path = ROOT) -> str:
    """Name the commit that is checked out.

    Raises:
        SystemExit: a file differs from it, outside the folder of rows.
    """
    changed = _git(root, "status", "--porcelain", "--", ".", ":!experiments/rows")
    if changed:
        raise SystemExit(f"rows name the commit that made them: commit these first\n{changed}")
    return _git(root, "rev-parse", "HEAD")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.rstrip()
