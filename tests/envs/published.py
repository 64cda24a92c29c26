"""Small files in the layouts that data sets are published in, and every episode that an environment makes of them."""

import gzip
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.errors import UsageError
from agentrl.toolenv.base import ToolEnv

Row = Mapping[str, Any]
LAYOUTS: dict[str, dict[str, tuple[str, Row]]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""By kind of problem and data set: the name of a file, and a row of it with names of what differs in ``<>``."""


def tables(name: str) -> dict[str, Any]:
    """What the TOML file of this name holds."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


def filled(template: Any, values: Row) -> Any:
    """A row of a layout. A text that is a single name becomes its value; elsewhere the value stands as text."""
    if isinstance(template, dict):
        return {key: filled(part, values) for key, part in template.items()}
    if isinstance(template, list):
        return [filled(part, values) for part in template]
    if isinstance(template, str):
        if template[1:-1] in values:
            return values[template[1:-1]]
        for name, value in values.items():
            template = template.replace(f"<{name}>", str(value))
    return template


def publish(folder: Path, kind: str, layout: str, problems: Sequence[Row]) -> str:
    """A file of these problems in a layout of this kind."""
    name, template = LAYOUTS[kind][layout]
    return write(folder / name, [filled(template, {"i": i, **problem}) for i, problem in enumerate(problems)])


def write(path: Path, rows: Sequence[object]) -> str:
    """A file of ``rows``, in the format that its name says; a text is a line as it is."""
    lines = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()
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


def play(env: ToolEnv, task_id: str, *actions: str) -> tuple[float, bool]:
    """The return of an episode, and whether it was terminated."""
    env.reset(seed=0, options={"task": task_id})
    turns = [env.step(action) for action in actions]
    return sum(reward for _, reward, *_ in turns), turns[-1][2]
