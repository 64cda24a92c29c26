"""The image that containers of the ``docker`` back end are made from, built on this machine.

Where a registry can be reached it comes from ``image/Dockerfile``; where none can be reached it is put together from
this machine's own interpreter, its packages, the shared libraries that they need and a few shell tools. It holds no
code of ours: that is sent to each container when it starts, so an image never goes stale.
"""

import os
import re
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from agentrl.sandboxes.base import SandboxError
from agentrl.sandboxes.docker import engine as docker_engine
from agentrl.sandboxes.inside import rootfs

IMAGE: Final = "agentrl-sandbox:latest"
"""Name of the image that ``build_image`` makes and the back end uses."""
FOLDER: Final = Path(__file__).parents[1] / "image"
"""Folder of the Dockerfile."""

_TOOLS: Final = """
sh bash cat cp mv rm ls mkdir rmdir ln touch chmod sleep echo printf env true false yes head tail sort uniq wc tr cut
tee seq date expr basename dirname id uname grep sed awk find xargs kill ps
"""
# Parts of the standard library that no program in a sandbox can use: they need a screen, a network or a compiler.
_LEFT_OUT: Final = {"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"}
_FOLDERS: Final = ("tmp", "proc", "sys", "dev", "etc", "opt")
_NO_REGISTRY: Final = re.compile(
    "no such host|lookup .* on |connection refused|timeout|timed out|network is unreachable|toomanyrequests|"
    "temporary failure|proxyconnect|eof|tls|x509",
    re.IGNORECASE,
)


def build_image(packages: Sequence[str] = ()) -> str:
    """Build the image from the Dockerfile, or from this machine's Python where no registry can be reached.

    Args:
        packages: Packages that programs may import beside the usual ones: pip gets them for the Dockerfile, else they
            are those that are installed here.

    Returns:
        Its id.

    Raises:
        SandboxUnavailable: No engine can be reached.
        SandboxError: The build failed.
    """
    with docker_engine.connect() as engine:
        try:
            # The engine may have no bridge, so the build shares the network of its machine; containers get none.
            wanted = {"PACKAGES": " ".join(packages)}
            engine.build(IMAGE, path=str(FOLDER), network_mode="host", buildargs=wanted)
            return engine.image(IMAGE).id
        except SandboxError as error:
            if not _NO_REGISTRY.search(str(error)):
                raise
        return from_host(engine, IMAGE, packages)


def from_host(engine: docker_engine.DockerEngine, tag: str, packages: Sequence[str]) -> str:
    """Build an image from this machine's Python and return its id.

    Raises:
        SandboxError: The engine failed.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-image-") as scratch:
        plan = rootfs.plan(scratch, packages)
        with open(os.path.join(scratch, "image.tar"), "w+b") as file:
            _pack(plan, file)
            file.seek(0)
            engine.load(file, tag, _settings(plan))
    return engine.image(tag).id


def _settings(plan: rootfs.MountPlan) -> list[str]:
    label = f"LABEL {docker_engine.PYTHON_LABEL}={plan['python']}"
    lines = [f"ENV PYTHONPATH={rootfs.SITE}", "LABEL agentrl.sandbox=image", label]
    return [*lines, f"ENV LD_LIBRARY_PATH={plan['libraries']}"] if plan["libraries"] else lines


def _pack(plan: rootfs.MountPlan, file: IO[bytes]) -> None:
    """Write the tar file: interpreter, packages, tools, and every shared library that one of them needs."""
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in _FOLDERS:
            entry = tarfile.TarInfo(name)
            # The engine gives the file system that it mounts on /tmp the rights of the folder below.
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for target, path in [*plan["links"], (plan["python"], "/usr/bin/python3")]:
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        binaries: list[str] = []
        for source, path in _folders(plan):
            tar.add(source, path.lstrip("/"), filter=_clean)
            binaries += _binaries(source)
        for source, path in _files(binaries, [folder for folder, _ in _folders(plan)]):
            tar.add(source, path.lstrip("/"), filter=_clean)


def _folders(plan: rootfs.MountPlan) -> Iterator[tuple[str, str]]:
    """Yield the folders of the interpreter and of the packages, and where they go."""
    for source, path in plan["binds"]:
        if path.startswith((rootfs.PYTHON_HOME, rootfs.SITE)):
            if path != rootfs.PYTHON_HOME:
                yield source, path
                continue
            yield os.path.join(source, "lib"), f"{path}/lib"
            yield os.path.join(source, os.path.relpath(plan["python"], path)), plan["python"]
    if not plan["python"].startswith(rootfs.PYTHON_HOME):
        standard = sysconfig.get_path("stdlib")
        yield standard, standard
        yield plan["python"], plan["python"]


def _clean(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Skip what programs can't use and other installed packages; forget who owns the files here."""
    parts = entry.name.split("/")
    ours = entry.name.startswith(rootfs.SITE.lstrip("/"))
    if not ours and (_LEFT_OUT.intersection(parts) or parts[-1] in ("site-packages", "dist-packages")):
        return None
    if entry.name.endswith((".a", ".o")):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode |= 0o444 if entry.isfile() else 0o555
    return entry


def _binaries(source: str) -> list[str]:
    """List the shared libraries below a folder, or the file itself."""
    if os.path.isfile(source):
        return [source]
    libraries = [path for path in Path(source).rglob("*.so*") if path.is_file()]
    return [str(path) for path in libraries if "site-packages" not in path.relative_to(source).parts]


def _files(binaries: list[str], have: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the tools, and every library that is needed and not in one of the folders in ``have``."""
    tools = {tool: shutil.which(tool, path="/usr/bin:/bin") for tool in _TOOLS.split()}
    needed = {f"/usr/bin/{tool}": os.path.realpath(program) for tool, program in tools.items() if program is not None}
    for library in _needs([*binaries, *needed.values()]):
        # /lib is a link to /usr/lib on most systems, and the image has the same links.
        path = os.path.join(os.path.realpath(os.path.dirname(library)), os.path.basename(library))
        if not any(path.startswith(folder + "/") for folder in have):
            needed[path] = os.path.realpath(library)
    if os.path.exists("/etc/ld.so.cache"):
        needed["/etc/ld.so.cache"] = "/etc/ld.so.cache"
    for path, source in sorted(needed.items()):
        yield source, path


def _needs(binaries: list[str]) -> set[str]:
    """Return the libraries that these files need, all the way down, as the loader names them."""
    libraries: set[str] = set()
    for start in range(0, len(binaries), 200):
        done = subprocess.run(["ldd", *binaries[start : start + 200]], capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            match = re.match(r"\s+(?:\S+ => )?(/\S+) \(0x", line)
            if match:
                libraries.add(match.group(1))
    return libraries
