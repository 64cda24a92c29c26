"""The benchmarks run: their help, and a small one of each; nothing is timed."""

import json
import shlex
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from .forked import Server

Run = Callable[..., str]
Require = Callable[[bool, str], None]
FOLDER = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks"


@pytest.fixture
def run(server: Server) -> Run:
    """What a benchmark prints."""

    def run(name: str, *words: str | Path) -> str:
        done = server.run(FOLDER / name, *words, cwd=Path("/"))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def rows_of(shown: str) -> list[list[str]]:
    """The cells of the rows of Markdown's tables in it, without their heads."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()[2:] if line[:2] == "| "]


pytestmark, SLOW = pytest.mark.ci, pytest.mark.slow
TABLES = [
    pytest.param("engines.py --quick", ["transformers", "generate", "generate_batch"], marks=SLOW),
    pytest.param("shared_prompt.py --quick", ["sample", "score", "update"]),
    pytest.param("async.py --quick", ["off", "lag", "inflight, 1", "inflight, 2", "inflight, 2, 2 spare"], marks=SLOW),
    pytest.param("long_context.py --tokens 128 1100 --layers 1 --hidden 16 --heads 2", ["update"] * 2 + [""] * 6),
    pytest.param(f"end_to_end.py --quick --without-trl --steps 2 --beside {shlex.quote(str(FOLDER.parents[1]))}",
                 ["ragged"] * 2 + ["fixed"] * 2, marks=SLOW),
]  # fmt: skip
"""Command line of a benchmark, and the first cell of each row that it prints."""


@pytest.mark.parametrize(("line", "names"), TABLES, ids=lambda value: str(value).split(".")[0])
def test_a_benchmark_prints_its_table(run: Run, line: str, names: list[str]) -> None:
    rows = rows_of(run(*shlex.split(line)))
    assert len(rows) == len(names) and all(name in ("", row[0]) for row, name in zip(rows, names, strict=True))


@pytest.mark.parametrize(
    ("line", "measures"),
    [
        ("head.py --device cpu --threads 1", {"ours: forward", "ours: forward + backward"}),
        pytest.param("sandboxes.py --only local", {"local: warm cell"}, marks=SLOW),
    ],
)
def test_a_benchmark_writes_its_numbers(run: Run, tmp_path: Path, line: str, measures: set[str]) -> None:
    shown = run(*shlex.split(line), "--quick", "--json", numbers := tmp_path / "new" / "numbers.json")
    written = json.loads(numbers.read_text())
    assert measures <= written["seconds"].keys() and "failed:" not in shown
    assert all(0 < second < 10 for row in written["seconds"].values() for second in row)
    assert any(measure["target"] for measure in written["measures"])


@pytest.mark.ray
def test_larger_fleets_are_simulated(run: Run, require: Require) -> None:
    require(find_spec("ray") is not None, "needs ray: pip install 'agentrl[ray]'")
    rows = rows_of(run(*shlex.split("fleet.py --simulate --train-tokens 1e9 --driver-ms 20 --hop-seconds 0")))
    rows = [row for row in rows if row[0].isdigit()]
    assert [row[0] for row in rows] == ["1", "4", "16", "64", "250", "1000"]
    assert rows[0][-1] == "actors" and rows[-1][-1] == "driver", "it sends one group after the other"
    assert [float(row[2]) for row in rows] == pytest.approx([0.02 * 128 * int(row[0]) for row in rows], rel=0.01)


@pytest.mark.slow
def test_the_viewer_is_measured(run: Run, require: Require) -> None:
    require(shutil.which("chromium") is not None, "needs chromium")
    assert run("viewer.py", "--quick").count("| < 3 s |") == 2


@pytest.mark.slow
def test_the_memory_of_ranks_is_measured(run: Run) -> None:
    shown = run("ranks_memory.py", "--ranks", "2", "--layers", "2", "--hidden", "64", "--tokens", "64")
    assert "bytes are equal" in shown
    assert all(int(row[2]) + int(row[3]) == int(row[4]) > 0 for row in rows_of(shown) if row[2].isdigit())


@pytest.mark.slow
def test_sizes_of_models_are_laid_out_on_cards(run: Run) -> None:
    rows = [line.split(" | ") for line in run("model_sizes.py").splitlines()[2:]]
    # More cards never fit less, and larger models never more.
    order = ["does not fit", "LoRA", "all weights"]
    ranks = [[order.index(cell.partition(":")[0].strip(" |")) for cell in row[1:]] for row in rows]
    assert all(row == sorted(row) for row in ranks) and ranks == sorted(ranks, reverse=True)
    assert ranks[0][1:] == [2, 2, 2] and ranks[-1][0] == 0
