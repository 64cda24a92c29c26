"""Small files in the layouts that data sets are published in, and every episode that an environment makes of them."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.errors import UsageError
from agentrl.toolenv.base import ToolEnv

Row = Mapping[str, Any]


def write(path: Path, rows: Sequence[Row]) -> str:
    """A file of ``rows``, in the format that its name says."""
    lines = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    else:
        path.write_bytes(json.dumps(rows).encode() if path.suffix == ".json" else lines)
    return str(path)


def played(env_id: str, **options: Any) -> Iterator[ToolEnv]:
    """The environment at the start of each of its episodes, of either split."""
    for split in ("train", "test"):
        env = agentrl.make(env_id, split=split, **options)
        try:
            tasks = [task.id for task in env.task_set]
        except UsageError as error:
            assert "split" in str(error)  # three rows may all be in the other one
            tasks = []
        for task in tasks:
            env.reset(seed=0, options={"task": task})
            yield env
        env.close()
