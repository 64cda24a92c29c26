"""Programs of their own, for what only those can show."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(*argv: str, folder: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """What Python says where nobody installed this checkout, nothing is typed, and these variables are set."""
    paths = {"PYTHONPATH": str(ROOT)} | env
    command = [sys.executable, *argv]
    return subprocess.run(
        command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
