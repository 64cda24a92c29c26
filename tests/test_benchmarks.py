"""The benchmarks run: their help, and a small one of each; nothing is timed."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl.sandboxes import Sandbox

from .forked import Server

Run = Callable[..., str]
FOLDER = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks"


@pytest.fixture
def run(server: Server) -> Run:
    """What a benchmark prints."""

    def run(name: str, *words: str | Path) -> str:
        done = server.run(FOLDER / name, *words, cwd=Path("/"))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.ci
def test_sandboxes_are_measured(run: Run, sandbox: Sandbox, tmp_path: Path) -> None:
    numbers = tmp_path / "new" / "sandboxes.json"
    shown = run("sandboxes.py", "--quick", "--only", "local", "--json", numbers)
    assert "failed:" not in shown, shown
    written = json.loads(numbers.read_text())
    assert all(0 < second < 10 for row in written["seconds"].values() for second in row)
    assert len(written["seconds"]["local: warm cell"]) == 30 and written["seconds"]["python3 -c pass"]
    met = {measure["name"]: measure["met"] for measure in written["measures"]}
    assert {"local: warm cells", "local: fresh one-shots", "local: next cell after fork bomb"} <= set(met)
    assert met["local: memory per ready session (PSS)"] is not False  # None for a user who may not look


def test_the_head_is_measured(run: Run, tmp_path: Path) -> None:
    numbers = tmp_path / "new" / "head.json"
    shown = run("head.py", "--quick", "--device", "cpu", "--threads", "1", "--json", numbers)
    written = json.loads(numbers.read_text())
    assert all(len(row) == 2 and all(0 < second < 10 for second in row) for row in written["seconds"].values())
    assert {"ours: forward", "ours: forward + backward", "eager log_softmax: forward"} <= set(written["seconds"])
    promised = [measure for measure in written["measures"] if measure["target"]]
    assert [measure["target"] for measure in promised] == ["<= 1/20", "<= 1.05", "<= 1.45"]
    assert all(f"| {measure['name']} | {measure['value']} |" in shown for measure in promised)


def test_long_rows_are_measured(run: Run) -> None:
    shown = run("long_context.py", "--tokens", "128", "1100", "--layers", "1", "--hidden", "16", "--heads", "2")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()[2:]]
    assert [(row[0], row[1]) for row in rows[:2]] == [("update", "128"), ("update", "1100")] and len(rows) == 8
    assert all(float(cell) > 0 for row in rows for cell in row[1:4])


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("engines.py", ["| transformers", "| generate", "| generate_batch"]),
        ("shared_prompt.py", ["| sample", "| score", "| update"]),
        pytest.param(
            *("async.py", ["| off", "| lag", "| inflight, 1", "| inflight, 2", "| inflight, 2, 2 spare"]),
            marks=[pytest.mark.slow, pytest.mark.ci],
        ),
    ],
)
def test_engines_shared_prompts_and_overlap_are_measured(run: Run, name: str, rows: list[str]) -> None:
    shown = run(name, "--quick")
    assert [line.split(" | ")[0] for line in shown.splitlines()[2:]] == rows


@pytest.mark.slow
def test_the_whole_loop_is_measured(run: Run) -> None:
    root = FOLDER.parents[1]
    shown = run("end_to_end.py", "--quick", "--without-trl", "--steps", "2", "--beside", root)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        [load, side] for load in ("ragged", "fixed") for side in ("agentrl", str(root))
    ]
    assert all(float(row[2]) > 0 for row in rows) and [row[4] for row in rows[2:]] == ["20, 20-20"] * 2
    assert rows[0][4] == rows[1][4] and rows[0][3].startswith("1.00 ")


@pytest.mark.ray
def test_larger_fleets_are_simulated(run: Run, require: Callable[[bool, str], None]) -> None:
    require(find_spec("ray") is not None, "needs ray: pip install 'agentrl[ray]'")
    shown = run("fleet.py", "--simulate", "--train-tokens", "1e9", "--driver-ms", "20", "--hop-seconds", "0")
    rows = [line.split(" | ") for line in shown.splitlines() if line[:3] in ("| 1", "| 2", "| 4", "| 6")]
    assert [row[0] for row in rows] == ["| 1", "| 4", "| 16", "| 64", "| 250", "| 1000"]
    assert rows[0][-1] == "actors |" and rows[-1][-1] == "driver |", "it sends one group after the other"
    assert [float(row[2]) for row in rows] == pytest.approx([0.02 * 128 * int(row[0][2:]) for row in rows], rel=0.01)


@pytest.mark.slow
def test_the_viewer_is_measured(run: Run, require: Callable[[bool, str], None]) -> None:
    require(shutil.which("chromium") is not None, "needs chromium")
    shown = run("viewer.py", "--quick")
    assert [line.split(" | ")[0] for line in shown.splitlines() if "< 3 s" in line] == [
        "| 20 x 60 tokens in 3 turns: first episode shown", "| 1 x 400 tokens in 50 turns: first episode shown"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.ci
def test_the_memory_of_ranks_is_measured(run: Run) -> None:
    shown = run("ranks_memory.py", "--ranks", "2", "--layers", "2", "--hidden", "64", "--tokens", "64")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line[:2] == "| "][1:]
    assert len(rows) == 11 and all(int(row[2]) + int(row[3]) == int(row[4]) > 0 for row in rows)
    assert "bytes are equal" in shown


@pytest.mark.slow
@pytest.mark.ci
def test_sizes_of_models_are_laid_out_on_cards(run: Run) -> None:
    rows = [line.split(" | ") for line in run("model_sizes.py").splitlines()[2:]]
    # More cards never fit less, and larger models never more.
    order = ["does not fit", "LoRA", "all weights"]
    ranks = [[order.index(cell.partition(":")[0].strip(" |")) for cell in row[1:]] for row in rows]
    assert all(row == sorted(row) for row in ranks) and ranks == sorted(ranks, reverse=True)
    assert ranks[0][1:] == [2, 2, 2] and ranks[-1][0] == 0
