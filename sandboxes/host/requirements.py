"""Checks what the local back end requires of this machine, and names the command that remedies it."""

import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agentrl.sandboxes.base import SandboxUnavailable
from agentrl.sandboxes.inside import kernel

OLDEST_KERNEL: Final = (5, 14)
_UNCONFINED: Final = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"


SETTINGS: Final = {
    "user.max_user_namespaces": ("0", "10000"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
}
"""Every setting of the kernel that can forbid user namespaces: the value that does, and one that allows them."""


def _path(setting: str) -> Path:
    return Path(f"/proc/sys/{setting.replace('.', '/')}")


def _read(setting: str) -> str | None:
    """Return a setting's value, or ``None`` where this kernel has no such setting."""
    path = _path(setting)
    return path.read_text().strip() if path.exists() else None


def outer_filter() -> bool:
    """Return whether a container or the like has put a system call filter on this process."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    return status["Seccomp"].strip() != "0"


def facts() -> Mapping[str, str]:
    """Return what decides whether programs can be isolated here: kernel, processor, settings, outer filter."""
    machine = {"kernel": f"{os.uname().sysname} {os.uname().release}", "processor": kernel.MACHINE}
    if not kernel.supported():
        return machine
    settings = {_path(setting).name: _read(setting) for setting in SETTINGS}
    return {
        **machine,
        **{name: value for name, value in settings.items() if value is not None},
        "outer seccomp filter": "yes" if outer_filter() else "no",
    }


def check_kernel() -> None:
    """Refuse a kernel or a processor that the local back end was not made for.

    Raises:
        SandboxUnavailable: It can't run here.
    """
    if not kernel.supported():
        raise SandboxUnavailable(f"the local back end needs Linux on x86_64 or aarch64, not {kernel.MACHINE}")
    version = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if version < OLDEST_KERNEL:
        raise SandboxUnavailable(
            f"the local back end needs Linux 5.14, which counts processes per sandbox, not {version}"
        )


def raise_open_files() -> None:
    """Raise this process's soft limit of open files to the hard one, and so that of all sessions' first processes.

    The kernel also bounds by it the descriptors that a user has under way: one program fills the usual 1024.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def explain(why: str) -> SandboxUnavailable:
    """Make the error that names what the launcher failed of, and the remedy.

    Args:
        why: The kernel's answer to the launcher.
    """
    for setting, (forbids, allows) in SETTINGS.items():
        if _read(setting) == forbids:
            remedy = f"sysctl -w {setting}={allows}"
            what = f"this kernel forbids user namespaces ({_path(setting)} is {forbids})"
            return SandboxUnavailable(f"{what}: run as root `{remedy}` ({why})", remedy=remedy)
    if outer_filter():
        what, options = "an outer sandbox or container forbids namespaces by seccomp", _UNCONFINED
    elif why.startswith("mount(proc"):
        what, options = "an outer container masks parts of /proc", "--security-opt systempaths=unconfined"
    else:
        return SandboxUnavailable(f"the local sandbox could not be set up: {why}")
    return SandboxUnavailable(f"{what}: start it with `{options}` ({why})", remedy=f"docker run {options} …")
