"""Distributions that offer environments, as an installer leaves them in a folder."""

import importlib
from pathlib import Path

from agentrl.toolenv.registry import GROUP


def offer(folder: Path, name: str, value: str, point: str = "", *, code: str | None = None) -> None:
    """Leave a distribution whose entry point names ``value``, and the module of that name where its code is given."""
    if code is not None:
        (folder / f"{value}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{point or name} = {value}\n")
    importlib.invalidate_caches()
