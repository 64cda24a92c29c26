"""Raw rows of experiments: a JSON object a line for each finished unit, with the commit that it was made with.

A row is never deleted. One that no longer counts has the reason in ``superseded``.
"""

import fcntl
import json
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "experiments" / "rows"


class RowFile:
    """A file of rows, to which units are added as they finish; one that has a row is not done again.

    Several processes may add rows to one file.

    Args:
        path: of the file, which need not be there. A last line that a kill cut off is taken away.
        commit: of the code, named in each new row.
    """

    def __init__(self, path: Path, commit: str) -> None:
        self._path, self._commit = path, commit
        self.rows: list[dict[str, Any]] = []
        self.refresh()

    def has(self, unit: Mapping[str, Any]) -> bool:
        """Return True if a unit, named by its settings, has a row."""
        return any(row["unit"] == unit for row in self.rows)

    def refresh(self) -> None:
        """Read what other processes have added."""
        if self._path.exists():
            with self._locked() as file:
                self._read(file)

    def add(self, unit: Mapping[str, Any], **results: Any) -> None:
        """Append the row of a unit."""
        row = {"unit": dict(unit), "commit": self._commit, "date": datetime.now(UTC).date().isoformat(), **results}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as file:
            self._read(file)
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self.rows.append(row)

    @contextmanager
    def _locked(self) -> Generator[IO[bytes]]:
        with self._path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _read(self, file: IO[bytes]) -> None:
        file.seek(0)
        text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        # Whoever has the lock is alone, so a line without an end has nobody who still writes it.
        if whole != text:
            file.truncate(len(whole))
        self.rows = _counted(whole.decode())


def _counted(text: str) -> list[dict[str, Any]]:
    """Parse the rows of a file, without those that say why they count no longer: their units are done again."""
    return [row for line in text.splitlines() if "superseded" not in (row := json.loads(line))]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file that count; none where it is not there."""
    return _counted(path.read_text(encoding="utf-8")) if path.exists() else []


def digits(value: float, count: int = 6) -> float:
    """Round to so many significant digits."""
    return float(f"{value:.{count}g}")


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
