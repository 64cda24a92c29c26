"""Checks what the local back end requires of this machine, and names the command that remedies it."""

import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agentrl.sandboxes.base import SandboxUnavailable
from agentrl.sandboxes.inside import kernel

OLDEST_KERNEL: Final = (5, 14)
_UNCONFINED: Final = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of the kernel that can forbid user namespaces."""

    name: str
    """Its name, as ``sysctl`` takes it."""
    forbids: str
    """The value that forbids them."""
    allows: str
    """A value that allows them."""

    @property
    def path(self) -> str:
        """File that holds it."""
        return f"/proc/sys/{self.name.replace('.', '/')}"

    @property
    def remedy(self) -> str:
        """The command, to be run as root, that allows them."""
        return f"sysctl -w {self.name}={self.allows}"

    def read(self) -> str | None:
        """Return the value, or ``None`` where this kernel has no such setting."""
        if not os.path.exists(self.path):
            return None
        with open(self.path) as file:
            return file.read().strip()


SETTINGS: Final = (
    Setting(name="user.max_user_namespaces", forbids="0", allows="10000"),
    Setting(name="kernel.unprivileged_userns_clone", forbids="0", allows="1"),
    Setting(name="kernel.apparmor_restrict_unprivileged_userns", forbids="1", allows="0"),
)
"""Every such setting that is known, in the order in which they are looked at."""


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
    settings = {setting.path.rpartition("/")[2]: setting.read() for setting in SETTINGS}
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
    for setting in SETTINGS:
        if setting.read() == setting.forbids:
            what = f"this kernel forbids user namespaces ({setting.path} is {setting.forbids})"
            return SandboxUnavailable(f"{what}: run as root `{setting.remedy}` ({why})", remedy=setting.remedy)
    if outer_filter():
        what = "an outer sandbox or container forbids namespaces by seccomp"
        return SandboxUnavailable(
            f"{what}: start it with `{_UNCONFINED}` ({why})", remedy=f"docker run {_UNCONFINED} …"
        )
    if why.startswith("mount(proc"):
        options = "--security-opt systempaths=unconfined"
        what = "an outer container masks parts of /proc"
        return SandboxUnavailable(f"{what}: start it with `{options}` ({why})", remedy=f"docker run {options} …")
    return SandboxUnavailable(f"the local sandbox could not be set up: {why}")
