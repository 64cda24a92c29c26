"""Compile the C code beside this, once for each source, compiler and processor.

The result is code that this process runs, so it is kept where nobody else may write: in ``agentrl/native`` below
``$XDG_CACHE_HOME`` or ``~/.cache``, which must be the user's own. Where it is not, it is compiled for this process
alone. ``$CC`` and ``$CFLAGS`` are honoured.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentrl.native import Unavailable

SOURCES = tuple(Path(__file__).with_name(name) for name in ("step.c", "attention.c", "norm.c"))
_READ = (*SOURCES, Path(__file__).with_name("vectors.h"))
# Never -ffast-math: it would sum in another order in each place.
_FLAGS = ("-O3", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC", "-Wno-unknown-pragmas")
# For AMD's processors GCC fuses some multiplications with additions and leaves others alone, by the code around them:
# a token's bits would depend on how many rows a kernel computes.
_FUSE_ALL = "--param=avoid-fma-max-bits=0"
# The first that the compiler takes; without OpenMP there is one thread.
_TARGETS = (
    ("-march=native", "-fopenmp", _FUSE_ALL),
    ("-march=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
_COMPILERS = ("gcc", "clang", "cc")
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The compiled code, loaded into this process."""

    calls: ctypes.CDLL
    """Its functions, which return int64 unless declared otherwise."""
    digest: str
    """Of source, compiler, options and processor, which together decide its bits; 16 hexadecimal digits."""


@cache
def library() -> Library:
    """Return the compiled code; compile it where no earlier process has.

    Raises:
        Unavailable: there is no compiler, or it can't compile the code.
    """
    compiler = find_compiler()
    digest = _digest(compiler)
    folder = _own_folder()
    if folder is not None and _is_own(compiled := folder / f"step-{digest}.so", stat.S_ISREG):
        # A file that was cut short, as by a full disk, is made again.
        with suppress(OSError):
            return _load(compiled, digest)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        made = Path(scratch) / "step.so"
        _compile(compiler, made)
        made.chmod(0o700)  # whatever the umask is: a file that others may write is not taken again
        loaded = _load(made, digest)
        if folder is not None:
            with suppress(OSError):
                made.replace(folder / f"step-{digest}.so")
        return loaded


def find_compiler() -> list[str]:
    """Return the command of a C compiler.

    Raises:
        Unavailable: there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    wanted = f"$CC is {shlex.join(named)!r}, which is not there" if named else "there is no C compiler"
    raise Unavailable(f"{wanted}: install one, for example with apt-get install gcc libc6-dev")


def _digest(compiler: Sequence[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False, timeout=_PATIENCE_S).stdout
    processor = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
        processor += repr(sorted(next(named, [])))
    options = repr((_FLAGS, _TARGETS, _own_flags()))
    parts = (*(source.read_bytes() for source in _READ), version, options.encode(), processor.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _own_flags() -> list[str]:
    return shlex.split(os.environ.get("CFLAGS", ""))


def _compile(compiler: Sequence[str], target: Path) -> None:
    """Compile the code into a file.

    Raises:
        Unavailable: the compiler fails.
    """
    why = ""
    for options in _TARGETS:
        command = [*compiler, *_FLAGS, *options, *_own_flags(), *map(str, SOURCES), "-o", str(target), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False, timeout=_PATIENCE_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{compiler[0]} can't be run: {error}") from error
        if done.returncode == 0:
            return
        # The last attempt asks for least, so what it says is the reason.
        why = next((line for line in done.stderr.splitlines() if "error" in line), f"it ends with {done.returncode}")
    raise Unavailable(f"{compiler[0]} can't compile the C code: {why.strip()}")


def _load(path: Path, digest: str) -> Library:
    calls = ctypes.CDLL(str(path))
    calls.panel.restype = ctypes.c_int64
    return Library(calls=calls, digest=digest)


def _own_folder() -> Path | None:
    """Return the folder that keeps compiled code, made if need be; None where it would not be this user's alone."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(OSError, RuntimeError):  # a read-only or missing home
        above = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
        folder = above / "agentrl" / "native"
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if _is_own(folder, stat.S_ISDIR) and _is_own(folder.parent, stat.S_ISDIR) and os.access(folder, os.W_OK):
            return folder
    return None


def _is_own(path: Path, kind: Callable[[int], bool]) -> bool:
    """Return whether a path is of this kind, belongs to this user, and nobody else can write there."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
