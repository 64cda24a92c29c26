"""Write Harbor task folders that ask how many lines of a file contain some letters: 48 to train on, and 24 for tests.

All share one image. docs/task_sets.md shows what a model of 135 million weights learns on them.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = """examples:
  python experiments/harbor_counts.py counts
"""
COUNTS = {"train": 48, "test": 24}
_SYLLABLES = ["ba", "de", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "we", "xi", "yo", "zu"]
_DOCKERFILE = "FROM agentrl-sandbox:latest\nWORKDIR /app\nCOPY app/ /app/\n"
_TASK = 'version = "1.0"\n\n[verifier]\ntimeout_sec = 60.0\n'
_TEST = """#!/bin/bash
if test "$(cat /app/count.txt)" = {count}; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi
"""


def write_tasks(folder: Path) -> None:
    """Write the tasks of both splits; no letters are asked for in both."""
    rng = random.Random(0)
    words = sorted({"".join(rng.choices(_SYLLABLES, k=rng.randint(3, 5))) for _ in range(3000)})
    pairs = [a + b for a in _SYLLABLES for b in _SYLLABLES]
    rng.shuffle(pairs)
    for split, count in COUNTS.items():
        for letters in (pairs.pop() for _ in range(count)):
            asked = f"How many lines of /app/words.txt contain {letters}? Write the number, alone, into /app/count.txt."
            files = {
                "task.toml": _TASK,
                "instruction.md": f"{asked}\n",
                "environment/Dockerfile": _DOCKERFILE,
                "environment/app/words.txt": "".join(f"{word}\n" for word in words),
                "solution/solve.sh": f"grep -c {letters} /app/words.txt >/app/count.txt\n",
                "tests/test.sh": _TEST.format(count=sum(letters in word for word in words)),
            }
            for name, text in files.items():
                path = folder / split / f"count-{letters}" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folders."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write them")
    write_tasks(parser.parse_args(argv).folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
