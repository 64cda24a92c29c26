"""The Linux calls that Python 3.11 does not wrap: namespaces, mounts, capabilities, and a bare ``clone``.

Sources: man pages clone(2), unshare(2), mount(2), mount_setattr(2), pivot_root(2), prctl(2), user_namespaces(7).
"""

import ctypes
import errno
import os
import platform
import struct
import time
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

NEWNS: Final = 0x00020000
NEWUTS: Final = 0x04000000
NEWIPC: Final = 0x08000000
NEWUSER: Final = 0x10000000
NEWPID: Final = 0x20000000
NEWNET: Final = 0x40000000
NEW_ALL: Final = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
CLONE_PARENT: Final = 0x00008000
_CLONE_CHILD_SETTID: Final = 0x01000000
_CLONE_CHILD_CLEARTID: Final = 0x00200000
_SIGCHLD: Final = 17

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 0x1000
MS_MOVE: Final = 0x2000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 1 << 18
_MNT_DETACH: Final = 2

ATTR_RDONLY: Final = 1
ATTR_NOSUID: Final = 2
ATTR_NODEV: Final = 4
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_GET_TID_ADDRESS: Final = 40
_PR_CAP_AMBIENT: Final = 47
_CAP_AMBIENT_RAISE: Final = 2
CAP_SETGID: Final = 6
CAP_SETUID: Final = 7

# Numbers of the calls for which libc has no function, by machine.
_NUMBERS: Final = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "mount_setattr": 442},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "mount_setattr": 442},
}
MACHINE: Final = platform.machine()
LAST_CAPABILITY: Final = 63


def supported() -> bool:
    """Return whether this is Linux on a processor whose system calls are known here."""
    return platform.system() == "Linux" and MACHINE in _NUMBERS


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(name: str, *arguments: int | bytes) -> int:
    # Bytes go as a pointer to them.
    values = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _checked(_libc.syscall(ctypes.c_long(_NUMBERS[MACHINE][name]), *values), name)


def unshare(flags: int) -> None:
    """Leave the namespaces in ``flags`` for fresh ones.

    Raises:
        OSError: The kernel or an outer sandbox forbids it.
    """
    _checked(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def clone(flags: int) -> int:
    """Copy this process, which must have one thread, and run no fork hooks: the copy is exact.

    ``os.fork`` reseeds ``random`` and can't make the copy a sibling (``CLONE_PARENT``).

    Returns:
        0 in the copy, its process id in the caller.

    Raises:
        OSError: Too many processes, or the namespaces in ``flags`` are forbidden.
    """
    # Without the thread-id word glibc of the copy would go on believing that it is the original.
    word = ctypes.c_void_p()
    if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(word), 0, 0, 0) == 0 and word.value:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    tid = word.value or 0
    last = (tid, 0) if MACHINE == "x86_64" else (0, tid)
    return _call("clone", flags | _SIGCHLD, 0, 0, *last)


def clone_sibling() -> int:
    """Copy this process, which must have one thread, as a child of its parent.

    Returns:
        0 in the copy, its process id in the caller.

    Raises:
        OSError: Too many processes, or descriptors.
    """
    caller = os.getpid()
    reader, writer = os.pipe()
    try:
        pid = clone(CLONE_PARENT)
        if pid == 0:
            _leave(caller, writer)
        elif _is_child(pid):
            # gVisor makes a child: it passes its own child on to pid 1 and ends.
            pid = int.from_bytes(os.read(reader, 4), "big")
            if pid == 0:
                raise OSError(errno.EAGAIN, "clone: the copy could not be copied")
        return pid
    finally:
        os.close(reader)
        os.close(writer)


def _leave(parent: int, writer: int) -> None:
    """Become no child of ``parent``, where this process is one."""
    if os.getppid() != parent:
        return
    between = os.getpid()
    try:
        pid = clone(0)
    except OSError:
        pid = -1
    if pid:
        os.write(writer, max(pid, 0).to_bytes(4, "big"))
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0002)


def _is_child(pid: int) -> bool:
    """Return whether this process has such a child, after waiting until that has ended."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return False
    return True


def write_maps(inside: int, outside_uid: int, outside_gid: int, proc: str = "/proc/self") -> None:
    """Map one user and one group of the parent user namespace into the fresh one that this process is in.

    Raises:
        OSError: The kernel refused.
    """
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside_uid} 1"),
        ("gid_map", f"{inside} {outside_gid} 1"),
    ):
        with open(f"{proc}/{name}", "w") as file:
            file.write(line)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Attach a file system, or one more view of one.

    Raises:
        OSError: The kernel refused.
    """
    packed = [None if part is None else part.encode() for part in (source, target, kind)]
    options = None if data is None else data.encode()
    _checked(_libc.mount(*packed, ctypes.c_ulong(flags), options), f"mount({source} on {target}, {kind})")


def unmount(path: str) -> None:
    """Detach what is mounted on ``path``: nobody finds it any more, and it ends with its last user.

    Raises:
        OSError: Nothing is mounted there.
    """
    _checked(_libc.umount2(path.encode(), _MNT_DETACH), f"umount2({path})")


def set_mount_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    """Add attributes, such as read-only, to a mount and, where asked, to all below it (Linux 5.12).

    Raises:
        OSError: The kernel is too old or refused.
    """
    # struct mount_attr: what to set, what to clear, propagation, user namespace.
    wanted = struct.pack("=4Q", attributes, 0, 0, 0)
    _call("mount_setattr", _AT_FDCWD, path.encode(), _AT_RECURSIVE if recursive else 0, wanted, len(wanted))


def pivot_into(path: str) -> None:
    """Make ``path``, a mount point, the root and let go of everything else.

    Raises:
        OSError: The kernel refused.
    """
    os.chdir(path)
    _call("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")


def _prctl(option: int, value: int, second: int = 0) -> None:
    arguments = [ctypes.c_ulong(part) for part in (value, second, 0, 0)]
    _checked(_libc.prctl(ctypes.c_int(option), *arguments), f"prctl({option})")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def set_dumpable(dumpable: bool) -> None:
    """Allow or forbid that processes of the same user look into this one through ``/proc`` or ptrace."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def _set_capabilities(low: int) -> None:
    # The third version's header, for this process; then effective, permitted and inheritable, and the same of the rest.
    _call("capset", struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", low, low, low, 0, 0, 0))


def keep_capabilities(*capabilities: int) -> None:
    """Drop all capabilities but these, of the first 32, which this process keeps when it executes a program.

    Raises:
        OSError: The kernel refused.
    """
    _set_capabilities(sum(1 << capability for capability in capabilities))
    for capability in capabilities:
        _prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_RAISE, capability)


def drop_privileges() -> None:
    """Drop every capability and the way back to any: bounding set, own sets, ``no_new_privs``.

    Raises:
        OSError: The kernel refused.
    """
    for capability in range(LAST_CAPABILITY + 1):
        # EINVAL: past the last capability of this kernel.
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    _set_capabilities(0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
