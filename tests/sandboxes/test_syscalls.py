"""Calls straight to the kernel, past Python: what is refused, and what ordinary programs need."""

import platform

import pytest

from agentrl.sandboxes import Sandbox, Session

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the call numbers below are those of x86_64")

CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
result = libc.syscall(*[ctypes.c_long(part) for part in {call!r}])
(result, ctypes.get_errno() if result < 0 else 0)
"""
EPERM, ENOSYS = 1, 38
REFUSED = {
    "ptrace": (101, 0, 0, 0, 0),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
    "process_vm_writev": (311, 1, 0, 0, 0, 0, 0),
    "kcmp": (312, 1, 1, 0, 0, 0),
    "pidfd_getfd": (438, 3, 0, 0),
    "mount": (165, 0, 0, 0, 0, 0),
    "umount2": (166, 0, 0),
    "pivot_root": (155, 0, 0),
    "chroot": (161, 0),
    "open_tree": (428, 0, 0, 0),
    "move_mount": (429, 0, 0, 0, 0, 0),
    "fsopen": (430, 0, 0),
    "fsmount": (432, 0, 0, 0),
    "mount_setattr": (442, 0, 0, 0, 0, 0),
    "unshare user": (272, 0x10000000),
    "unshare nothing": (272, 0),
    "setns": (308, 0, 0),
    "clone with a user namespace": (56, 0x10000011, 0, 0, 0, 0),
    "clone with a mount namespace": (56, 0x00020011, 0, 0, 0, 0),
    "clone with a network namespace": (56, 0x40000011, 0, 0, 0, 0),
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, 0, 0, 0),
    "userfaultfd": (323, 0),
    "io_uring_setup": (425, 1, 0),
    "io_uring_enter": (426, 0, 0, 0, 0, 0, 0),
    "io_uring_register": (427, 0, 0, 0, 0),
    "add_key": (248, 0, 0, 0, 0, 0),
    "request_key": (249, 0, 0, 0, 0),
    "keyctl": (250, 0, 0, 0, 0, 0),
    "init_module": (175, 0, 0, 0),
    "finit_module": (313, 0, 0, 0),
    "delete_module": (176, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "reboot": (169, 0, 0, 0, 0),
    "swapon": (167, 0, 0),
    "sethostname": (170, 0, 0),
    "settimeofday": (164, 0, 0),
    "clock_settime": (227, 0, 0),
    "clock_adjtime": (305, 0, 0),
    "syslog": (103, 0, 0, 0),
    "acct": (163, 0),
    "quotactl": (179, 0, 0, 0, 0),
    "iopl": (172, 3),
    "ioperm": (173, 0, 1, 1),
    "personality": (135, 0xFFFFFFFF),
    "memfd_create": (319, 0, 0),
    "memfd_secret": (447, 0),
    "shmget": (29, 0, 4096, 0o1600),
    "semget": (64, 0, 1, 0o1600),
    "msgget": (68, 0, 0o1600),
    "mq_open": (240, 0, 0, 0, 0),
    "fanotify_init": (300, 0, 0),
    "name_to_handle_at": (303, 0, 0, 0, 0, 0),
    "open_by_handle_at": (304, 0, 0, 0),
    "lookup_dcookie": (212, 0, 0, 0),
    "move_pages": (279, 0, 0, 0, 0, 0, 0),
    "migrate_pages": (256, 0, 0, 0, 0),
    "modify_ldt": (154, 0, 0, 0),
    "vhangup": (153,),
    "nfsservctl": (180, 0, 0, 0),
    "seccomp": (317, 0, 0, 0),
    "kill everything": (62, -1, 9),
    "kill pid 1": (62, 1, 9),
    "continue what is stopped": (62, 0, 18),
    "prlimit64 of pid 1": (302, 1, 7, 4096, 0),
    "setpriority of pid 1": (141, 0, 1, 19),
    "timer_create": (222, 0, 0, 0),
    "flock": (73, 0, 2),
    "inotify_init1": (294, 0),
    "socket of family vsock": (41, 40, 1, 0),
    "socket of family packet": (41, 17, 3, 0),
    "socket of family netlink": (41, 16, 3, 0),
    "socket of family alg": (41, 38, 5, 0),
    "socket of family bluetooth": (41, 31, 3, 1),
}
MISSING = {"clone3": (435, 0, 0), "a call of the future": (600,), "an x32 call": (0x40000000 + 39,)}
NEEDED = {
    "getpid": (39,),
    "gettid": (186,),
    "sched_yield": (24,),
    "socket of family unix": (41, 1, 1, 0),
    "socket of family inet": (41, 2, 1, 0),
    "eventfd2": (290, 0, 0),
    "epoll_create1": (291, 0),
    "timerfd_create": (283, 1, 0),
    "pidfd_open itself": (434, 2, 0),
}


@pytest.fixture(scope="module")
def shared(sandbox: Sandbox) -> Session:
    """One session for all calls of this file."""
    return sandbox.session()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(shared: Session, name: str) -> None:
    assert shared.run(CALL.format(call=REFUSED[name])).value == f"(-1, {EPERM})"


@pytest.mark.parametrize("name", MISSING)
def test_missing(shared: Session, name: str) -> None:
    assert shared.run(CALL.format(call=MISSING[name])).value == f"(-1, {ENOSYS})"


@pytest.mark.parametrize("name", NEEDED)
def test_needed(shared: Session, name: str) -> None:
    value = shared.run(CALL.format(call=NEEDED[name])).value
    assert value is not None and not value.startswith("(-1")
