"""What only a GPU can tell, in minutes: speed, memory, and whether what the code takes for granted holds there.

Each piece runs in a process of its own and has its own share of the time. Every row is on disk as soon as it is
measured, in OUT/PIECE.json. What fails, hangs or runs out of memory costs its own row or piece. A second call resumes
where the first one stopped.
"""

import json
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from gpu.assumptions import assumptions
from gpu.bench import Bench, say, usable, words
from gpu.learning import learn
from gpu.pieces import agreement, decode, kernels, memory, update

from agentrl.models.load import quiet

EXAMPLES = """examples:
  gpu_check.py --out DIR                        every piece that DIR does not hold yet, the most useful ones first
  gpu_check.py --out DIR agreement update       these alone
  gpu_check.py --out DIR --again learn          measure it anew
  gpu_check.py --out DIR --seconds 240          less time for each piece, 240 seconds for all
  gpu_check.py --out DIR --quick                does all of it run? tiny, on a CPU
"""
PIECES: dict[str, tuple[Callable[[Bench], None], int]] = {
    "assumptions": (assumptions, 50),
    "agreement": (agreement, 110),
    "update": (update, 120),
    "decode": (decode, 60),
    "kernels": (kernels, 75),
    "learn": (learn, 95),
    "memory": (memory, 30),
}
"""The most useful ones first, and the seconds of each."""
TOTAL = sum(seconds for _, seconds in PIECES.values())
FORK = multiprocessing.get_context("fork")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pieces one after the other, and print the table of their rows."""
    args = parsed(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    quiet()
    if args.inside:
        inside(args.pieces[0], args)
        return 0
    for name in args.pieces or PIECES:
        say(f"{name}: {play(name, args)}")
    contents = [json.loads(path.read_text()) for name in PIECES if (path := args.out / f"{name}.json").exists()]
    for content in contents:
        print(f"\n{content['piece']}: {content['ended']}, {content['device']}")
        for name, row in content["rows"].items():
            print(f"  {name}: {words(row)}")
    failed = [content for content in contents if content["ended"] != "done"]
    return 1 if failed or any("error" in row for content in contents for row in content["rows"].values()) else 0


def play(name: str, args: Namespace) -> str:
    """Run a piece in a process of its own, unless it is done; say how it ended."""
    path = args.out / f"{name}.json"
    if args.again:
        path.unlink(missing_ok=True)
    elif path.exists() and json.loads(path.read_text())["ended"] == "done":
        return "was done before"
    seconds, began = budget(name, args), time.monotonic()
    # Forked, so that no piece waits for its imports. A fork would wait for ever for a lock of another thread.
    assert threading.active_count() == 1
    process = FORK.Process(target=begin, args=(name, args))
    process.start()
    process.join(seconds)
    ended = ""
    if process.is_alive():
        ended = f"out of time after {seconds:.0f} s"
    elif process.exitcode:
        ended = f"ended with code {process.exitcode}"
    assert process.pid
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
    process.join()
    bench = bench_of(name, args)
    if ended and not bench.content["ended"]:
        bench.write(ended=ended)
    return f"{bench.content['ended']} in {time.monotonic() - began:.0f} s, {len(bench.content['rows'])} rows"


def budget(name: str, args: Namespace) -> float:
    """Return the seconds that a piece may take."""
    return PIECES[name][1] * args.seconds / TOTAL


def begin(name: str, args: Namespace) -> None:
    """Be the process of a piece, with the imports that are there, or with new ones where these have touched the GPU."""
    os.setsid()
    if name != "learn" and not usable(args.device):  # that one only starts others, which look for themselves
        again = ["--out", str(args.out), "--device", args.device, "--seconds", str(args.seconds), "--inside", name]
        os.execv(sys.executable, [sys.executable, __file__, *again, *(["--quick"] if args.quick else [])])
    inside(name, args)


def inside(name: str, args: Namespace) -> None:
    """Do a piece, and write how it ended."""
    bench = bench_of(name, args, time.monotonic() + budget(name, args))
    torch.manual_seed(0)
    try:
        if name != "learn" and not usable(args.device):
            raise RuntimeError(f"there is no device {args.device!r} here: --quick does without")
        # Of a piece that was cut off, what is there is kept.
        bench.write(ended="", device=bench.device if name == "learn" else device_name(bench), versions=versions())
        PIECES[name][0](bench)
        bench.write(ended="done", device=device_name(bench))
    except BaseException as error:
        bench.write(ended=f"failed: {error!r}"[:400], trace=traceback.format_exc()[-3000:])
        raise SystemExit(1) from error


def bench_of(name: str, args: Namespace, ends: float = 0.0) -> Bench:
    """Read what there is of a piece, or begin it."""
    path = args.out / f"{name}.json"
    return Bench(name=name, path=path, device=args.device, quick=args.quick, ends=ends)


def versions() -> str:
    """Name what computes here."""
    python = platform.python_version()
    return f"Python {python}, PyTorch {torch.__version__}, transformers {transformers.__version__}"


def device_name(bench: Bench) -> str:
    """Name the device; last, since a piece may only start processes that use it."""
    return torch.cuda.get_device_name(bench.device) if usable(bench.device) and bench.cuda else bench.device


def parsed(arguments: Sequence[str] | None) -> Namespace:
    """Parse the command line."""
    parser = ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where PIECE.json goes")
    parser.add_argument("--again", action="store_true", help="forget what DIR holds of these pieces")
    parser.add_argument("--seconds", type=float, default=TOTAL, help=f"for all pieces together (default {TOTAL})")
    parser.add_argument("--quick", action="store_true", help="a test that all runs, with tiny sizes on a CPU")
    parser.add_argument("--inside", action="store_true", help="do one piece in this very process")
    parser.add_argument("--device", help="a PyTorch device (default: cuda, with --quick cpu)")
    args = parser.parse_args(arguments)
    args.device = args.device or ("cpu" if args.quick else "cuda")
    if unknown := [name for name in args.pieces if name not in PIECES]:
        parser.error(f"there is no piece {unknown[0]!r}: choose of {', '.join(PIECES)}")
    args.out = args.out.resolve()
    return args


if __name__ == "__main__":
    sys.exit(main())
