"""Processes of this Python that end with the process that started them."""

import os
import subprocess
from pathlib import Path

import agentrl
from agentrl.processes.parent import start_python


def test_a_new_process_of_this_python_has_a_session_of_its_own(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        process = start_python(("-m", "agentrl", "--version"), log)
        assert isinstance(process, subprocess.Popen) and os.getsid(process.pid) == process.pid
        assert process.wait() == 0 and (tmp_path / "log").read_text() == f"agentrl {agentrl.__version__}\n"
