"""Builds the file system that a program sees from folders of the host, all read-only.

``plan`` runs in the host process and only looks; ``build`` runs in a fresh mount namespace and mounts. Nothing of the
host appears that is not named here: no ``/etc``, no homes, no working folder, and of the installed packages only
``PACKAGES``.
"""

import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypedDict

from agentrl.sandboxes.inside import kernel

PACKAGES: Final = ("numpy", "sympy", "mpmath", "scipy", "pandas", "networkx", "gmpy2", "dateutil", "pytz", "six")
"""Packages that programs may import where they are installed."""
PYTHON_HOME: Final = "/opt/python"
SITE: Final = "/opt/site"
RUNNER: Final = "/opt/agentrl"
_SYSTEM: Final = ("bin", "sbin", "lib", "lib32", "lib64", "usr")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_LIBRARIES: Final = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64")
# Where many an image of a container keeps the project that it is made for, and where settings of the host are.
_HIDDEN: Final = ("/usr/src", "/usr/local/src", "/usr/etc", "/usr/local/etc")
# What the loader and the names of some tools need: nothing else of /etc.
_CONFIGURED: Final = ("/etc/ld.so.cache", "/etc/alternatives")


class MountPlan(TypedDict):
    """Sources and places of all mounts; plain data, so that it can travel as JSON."""

    root: str
    """An empty folder on which the new root is mounted for a moment."""
    binds: list[tuple[str, str]]
    """Folders and files of the host and where they appear, read-only."""
    links: list[tuple[str, str]]
    """Symbolic links: target and place."""
    masks: list[str]
    """Folders inside the binds that appear empty: other installed packages, sources and settings."""
    python: str
    """The interpreter, as seen inside."""
    libraries: str
    """Folder of the interpreter's own shared library, or an empty string."""


def plan(root: str, packages: Sequence[str] = ()) -> MountPlan:
    """Decide what the sandbox on this machine is made of.

    Args:
        root: An empty folder.
        packages: Installed packages that programs may import beside ``PACKAGES``.
    """
    made: MountPlan = {"root": root, "binds": [], "links": [], "masks": [], "python": "", "libraries": ""}
    for name in _SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            made["links"].append((os.readlink(path), path))
        elif os.path.isdir(path):
            made["binds"].append((path, path))
    made["binds"] += [(path, path) for path in _CONFIGURED if os.path.exists(path)]
    _add_python(made)
    _add_packages(made, dict.fromkeys([*PACKAGES, *packages]))
    made["binds"].append((os.path.dirname(os.path.abspath(__file__)), f"{RUNNER}/inside"))
    return made


def _add_python(made: MountPlan) -> None:
    home = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = Path(sys._base_executable).resolve()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownArgumentType]
    if not python.is_relative_to(home):
        python = home / "bin" / version
    if not home.is_relative_to("/usr"):
        made["binds"].append((str(home), PYTHON_HOME))
        made["python"] = f"{PYTHON_HOME}/{python.relative_to(home)}"
        made["libraries"] = f"{PYTHON_HOME}/lib"
    else:
        made["python"] = str(python)
    # Installed packages may hold the answers of the very tasks that the program works on.
    schemes = [*site.getsitepackages([str(home)]), sysconfig.get_path("purelib", vars={"base": str(home)})]
    folders = {Path(folder) for folder in schemes}
    folders |= {path for where in _LIBRARIES for path in Path(where).glob("python3*/*-packages")}
    folders |= {home / "etc", *map(Path, _HIDDEN)}
    for folder in sorted(folders):
        inside = folder
        if folder.is_relative_to(home) and not home.is_relative_to("/usr"):
            inside = PYTHON_HOME / folder.relative_to(home)
        if folder.is_dir() and (inside.is_relative_to(PYTHON_HOME) or inside.is_relative_to("/usr")):
            made["masks"].append(str(inside))


def _add_packages(made: MountPlan, packages: Iterable[str]) -> None:
    for name in packages:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin).resolve()
        source = origin.parent if origin.name == "__init__.py" else origin
        made["binds"].append((str(source), f"{SITE}/{source.name}"))
        bundled = source.parent / f"{name}.libs"
        if bundled.is_dir():
            made["binds"].append((str(bundled), f"{SITE}/{bundled.name}"))


def build(made: MountPlan) -> None:
    """Mount the new root and make it the root; needs a fresh mount namespace and the right to mount.

    Raises:
        OSError: The kernel refused, or a folder is gone.
    """
    root = made["root"]
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "size=1m,mode=755")
    for source, path in made["binds"]:
        _bind(source, root + path, os.path.isdir(source))
        kernel.set_mount_attributes(
            root + path, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV, recursive=True
        )
    for device in _DEVICES:
        _bind(f"/dev/{device}", f"{root}/dev/{device}", False)
    _bind("/proc", f"{root}/proc", True)
    for folder in ("/tmp", "/dev/shm", SITE):
        os.makedirs(root + folder, exist_ok=True)
    for target, path in [*made["links"], ("/proc/self/fd", "/dev/fd"), ("/proc/self/fd/0", "/dev/stdin")]:
        os.symlink(target, root + path)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    for path in made["masks"]:
        if os.path.isdir(root + path):
            kernel.mount("tmpfs", root + path, "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID, "size=4k,mode=755")
    kernel.pivot_into(root)
    kernel.set_mount_attributes("/", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID, recursive=False)


def _bind(source: str, target: str, folder: bool) -> None:
    if folder:
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
