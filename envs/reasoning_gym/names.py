"""The names of reasoning-gym's tasks, listed so that registering them does not import that library.

Version 0.1.25. Left out is ``composite``, a mixture of the others.
"""

from pathlib import Path

TASKS: tuple[str, ...] = tuple(Path(__file__).with_name("names.txt").read_text(encoding="utf-8").split())
"""Each is an id: ``reasoning-gym/<name>-v0``."""
