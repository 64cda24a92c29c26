"""The notebook trains an agent, run as written; and what is committed of it was run in order and is small."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, python

NOTEBOOK = ROOT / "docs" / "notebooks" / "own_environment.ipynb"


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_the_committed_notebook_was_run_in_order() -> None:
    cells = code_cells(NOTEBOOK)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert NOTEBOOK.stat().st_size < 200_000


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_trains_an_agent(tmp_path: Path, require: Any) -> None:
    require(bool(find_spec("nbclient") and find_spec("ipykernel")), "needs nbclient and ipykernel")
    shutil.copy(NOTEBOOK, tmp_path)
    # Its cells start processes of their own, which find the package as this process does.
    program = "from nbclient.cli import main; main()"
    python("-c", program, "--inplace", NOTEBOOK.name, folder=tmp_path, OMP_NUM_THREADS="1")
    evals = [json.loads(line) for line in (tmp_path / "runs" / "first" / "evals.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evals] == [0, 4, 8, 12, 16]
    assert evals[-1]["success"] > max(0.75, evals[0]["success"]), "it learned nothing"
    texts = [text for output in code_cells(tmp_path / NOTEBOOK.name)[-1]["outputs"] for text in output["text"]]
    assert texts[-1] == "return: 1.0\n"
