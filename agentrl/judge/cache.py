"""Answers on disk, by the content of the request; several processes may share them."""

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from agentrl.errors import InfrastructureError

_WAIT_S = 60.0
"""Seconds to wait for another process that writes."""


class Cache:
    """Answers of models in an SQLite file.

    Args:
        folder: where ``answers.sqlite3`` is, or will be.
    """

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / "answers.sqlite3"

    def get(self, request: Mapping[str, object]) -> str | None:
        """Return the answer to a request, or None.

        Raises:
            InfrastructureError: the file can't be read.
        """
        rows = self._run("SELECT answer FROM answers WHERE key = ?", _key(request))
        return str(rows[0][0]) if rows else None

    def put(self, request: Mapping[str, object], answer: str) -> None:
        """Store an answer; one that is there already stays.

        Raises:
            InfrastructureError: the file can't be written.
        """
        self._run("INSERT OR IGNORE INTO answers VALUES (?, ?)", _key(request), answer)

    def _run(self, command: str, *values: str) -> list[tuple[object]]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A connection for each command: threads and forked processes may share none.
            with closing(sqlite3.connect(self._path, timeout=_WAIT_S)) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
                return connection.execute(command, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise InfrastructureError(
                f"the cache {str(self._path)!r} can't be used ({error}): name another folder, or delete the file"
            ) from error


def _key(request: Mapping[str, object]) -> str:
    # ASCII only, so that lone surrogates are no fault.
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode("ascii")).hexdigest()
