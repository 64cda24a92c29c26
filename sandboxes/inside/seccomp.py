"""Restricts the system calls of a program to an allow-list per processor, by a BPF filter in the kernel.

Everything else fails with ``EPERM``; calls that libc replaces when they are missing fail with ``ENOSYS``. The filter
checks the arguments of some calls: it refuses new namespaces, socket families that a network namespace does not contain
(vsock, packet, netlink), and typing into a terminal. A process can set its own limits, priority and cores only, and
signal every process but pid 1. Nobody can send SIGCONT, so that what is stopped stays stopped: not by a timer
(``timer_create`` takes its signal where a filter can't look), a file's owner, a parent's end or a child's. Files that
others use too can't be watched or leased, and nobody sees who locks them: where there are such files, ``flock`` is
refused, and :func:`agentrl.sandboxes.inside.program_files.flock` takes its place.

Sources: man page seccomp(2); numbers from the kernel's ``unistd_64.h`` and ``asm-generic/unistd.h``.
"""

import ctypes
import errno
import signal
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# name, number on x86_64, number on aarch64
_ALLOWED: Final = """
read 0 63; write 1 64; open 2 -; close 3 57; stat 4 -; fstat 5 80; lstat 6 -; poll 7 -; lseek 8 62; mmap 9 222;
mprotect 10 226; munmap 11 215; brk 12 214; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139;
ioctl 16 29; pread64 17 67; pwrite64 18 68; readv 19 65; writev 20 66; access 21 -; pipe 22 -; select 23 -;
sched_yield 24 124; mremap 25 216; msync 26 227; mincore 27 232; madvise 28 233; dup 32 23; dup2 33 -; pause 34 -;
nanosleep 35 101; getitimer 36 102; alarm 37 -; setitimer 38 103; getpid 39 172; sendfile 40 71; socket 41 198;
connect 42 203; accept 43 202; sendto 44 206; recvfrom 45 207; sendmsg 46 211; recvmsg 47 212; shutdown 48 210;
bind 49 200; listen 50 201; getsockname 51 204; getpeername 52 205; socketpair 53 199; setsockopt 54 208;
getsockopt 55 209; clone 56 220; fork 57 -; vfork 58 -; execve 59 221; exit 60 93; wait4 61 260; kill 62 129;
uname 63 160; fcntl 72 25; fsync 74 82; fdatasync 75 83; truncate 76 45; ftruncate 77 46;
getdents 78 -; getcwd 79 17; chdir 80 49; fchdir 81 50; rename 82 -; mkdir 83 -; rmdir 84 -; creat 85 -; link 86 -;
unlink 87 -; symlink 88 -; readlink 89 -; chmod 90 -; fchmod 91 52; chown 92 -; fchown 93 55; lchown 94 -;
umask 95 166; gettimeofday 96 169; getrlimit 97 163; getrusage 98 165; sysinfo 99 179; times 100 153;
getuid 102 174; getgid 104 176; geteuid 107 175; getegid 108 177; setpgid 109 154; getppid 110 173; getpgrp 111 -;
setsid 112 157; setuid 105 146; setgid 106 144; setreuid 113 145; setregid 114 143; getgroups 115 158;
setresuid 117 147; getresuid 118 148; setresgid 119 149; getresgid 120 150; getpgid 121 155; setfsuid 122 151;
setfsgid 123 152; getsid 124 156; capget 125 90; rt_sigpending 127 136; rt_sigtimedwait 128 137;
rt_sigqueueinfo 129 138; rt_sigsuspend 130 133; sigaltstack 131 132; utime 132 -; mknod 133 -; statfs 137 43;
fstatfs 138 44; getpriority 140 141; setpriority 141 140; sched_setparam 142 118; sched_getparam 143 121;
sched_setscheduler 144 119; sched_getscheduler 145 120; sched_get_priority_max 146 125;
sched_get_priority_min 147 126; sched_rr_get_interval 148 127; mlock 149 228; munlock 150 229; mlockall 151 230;
munlockall 152 231; prctl 157 167; arch_prctl 158 -; setrlimit 160 164; gettid 186 178;
readahead 187 213; setxattr 188 5; lsetxattr 189 6; fsetxattr 190 7; getxattr 191 8; lgetxattr 192 9;
fgetxattr 193 10; listxattr 194 11; llistxattr 195 12; flistxattr 196 13; removexattr 197 14; lremovexattr 198 15;
fremovexattr 199 16; tkill 200 130; time 201 -; futex 202 98; sched_setaffinity 203 122; sched_getaffinity 204 123;
epoll_create 213 -; getdents64 217 61; set_tid_address 218 96; restart_syscall 219 128; fadvise64 221 223;
clock_gettime 228 113; clock_getres 229 114; clock_nanosleep 230 115; exit_group 231 94; epoll_wait 232 -;
epoll_ctl 233 21; tgkill 234 131; utimes 235 -; waitid 247 95; openat 257 56; mkdirat 258 34; mknodat 259 33;
fchownat 260 54; futimesat 261 -;
newfstatat 262 79; unlinkat 263 35; renameat 264 38; linkat 265 37; symlinkat 266 36; readlinkat 267 78;
fchmodat 268 53; faccessat 269 48; pselect6 270 72; ppoll 271 73; set_robust_list 273 99; get_robust_list 274 100;
splice 275 76; tee 276 77; sync_file_range 277 84; vmsplice 278 75; utimensat 280 88; epoll_pwait 281 22;
signalfd 282 -; timerfd_create 283 85; eventfd 284 -; fallocate 285 47; timerfd_settime 286 86;
timerfd_gettime 287 87; accept4 288 242; signalfd4 289 74; eventfd2 290 19; epoll_create1 291 20; dup3 292 24;
pipe2 293 59; preadv 295 69; pwritev 296 70; rt_tgsigqueueinfo 297 240; recvmmsg 299 243;
prlimit64 302 261; sendmmsg 307 269; getcpu 309 168; sched_setattr 314 274; sched_getattr 315 275;
renameat2 316 276; getrandom 318 278; execveat 322 281; membarrier 324 283; mlock2 325 284;
copy_file_range 326 285; preadv2 327 286; pwritev2 328 287; statx 332 291; rseq 334 293; pidfd_send_signal 424 424;
pidfd_open 434 434; close_range 436 436; openat2 437 437; faccessat2 439 439; epoll_pwait2 441 441;
futex_waitv 449 449; pkey_mprotect 329 288; pkey_alloc 330 289; pkey_free 331 290;
"""
_FLOCK: Final = "flock 73 32"
_AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN: Final = {"x86_64": 1, "aarch64": 2}
_CLONE3: Final = 435
_LAST_KNOWN: Final = 451
_CHANNEL: Final = -1  # stands for the descriptor over which a program speaks with pid 1
_NEW_NAMESPACES: Final = 0x7E020000
_ALL: Final = 0xFFFFFFFF
_CONT: Final = signal.SIGCONT
_SMALL: Final = 1 << 16
_LOAD, _EQUAL, _ABOVE_OR_EQUAL, _ABOVE, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06, 0x54
_ALLOW: Final = 0x7FFF0000
_KILL_PROCESS: Final = 0x80000000
_DENY: Final = 0x00050000 | errno.EPERM
_MISSING: Final = 0x00050000 | errno.ENOSYS

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


@dataclass(frozen=True, slots=True)
class _Arg:
    """A condition on the low half, or the ``high`` one, of an argument of a call."""

    argument: int
    value: int
    test: int = _EQUAL
    negate: bool = False
    """The condition holds where the test fails."""
    high: bool = False
    mask: int = _ALL


def _other_process(argument: int = 0) -> tuple[_Arg]:
    # The caller is 0. Its own number is refused too, since a filter can't tell it from another's.
    return (_Arg(argument, 0, negate=True),)


# F_GETLK and F_OFD_GETLK would see who has locked a file that sessions share.
_LOOKS_AT_LOCKS: Final = ((_Arg(1, 5),), (_Arg(1, 36),))
# A call is refused where all conditions of one of its rows hold.
_REFUSED: Final[Mapping[str, tuple[tuple[_Arg, ...], ...]]] = {
    "clone": ((_Arg(0, _NEW_NAMESPACES, _ANY_BIT),), (_Arg(0, _CONT, mask=0xFF),)),
    "socket": ((_Arg(0, 1, negate=True), _Arg(0, 2, negate=True), _Arg(0, 10, negate=True)),),  # unix, inet, inet6
    # TIOCSTI and TIOCLINUX type into a terminal; FIOSETOWN and SIOCSPGRP say who gets a file's signals.
    "ioctl": (*((_Arg(1, request),) for request in (0x5412, 0x541C, 0x8901, 0x8902)), (_Arg(0, _CHANNEL),)),
    "kill": ((_Arg(0, 1),), (_Arg(0, _ALL),), (_Arg(1, _CONT),)),
    "tkill": ((_Arg(0, 1),), (_Arg(1, _CONT),)),
    "tgkill": ((_Arg(0, 1),), (_Arg(1, 1),), (_Arg(2, _CONT),)),
    "rt_sigqueueinfo": ((_Arg(0, 1),), (_Arg(1, _CONT),)),
    "rt_tgsigqueueinfo": ((_Arg(0, 1),), (_Arg(1, 1),), (_Arg(2, _CONT),)),
    "pidfd_open": ((_Arg(0, 1),),),
    "pidfd_send_signal": ((_Arg(1, _CONT),),),
    "prctl": ((_Arg(0, 1), _Arg(1, _CONT)),),  # PR_SET_PDEATHSIG
    # With no new limits it only reads, which is allowed.
    "prlimit64": tuple((*_other_process(), _Arg(2, 0, negate=True, high=high)) for high in (False, True)),
    "setpriority": (_other_process(0), _other_process(1)),  # PRIO_PROCESS is 0
    "sched_setparam": (_other_process(),),
    "sched_setscheduler": (_other_process(),),
    "sched_setattr": (_other_process(),),
    "sched_setaffinity": (_other_process(),),
    # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY; and F_SETPIPE_SZ, since all pipes of a user share a limit.
    "fcntl": (
        *_LOOKS_AT_LOCKS,
        *((_Arg(1, command),) for command in (8, 10, 15, 1024, 1026)),
        (_Arg(1, 1031), _Arg(2, _SMALL, _ABOVE)),
        *((_Arg(0, _CHANNEL), _Arg(1, command)) for command in (0, 4, 1030)),  # F_DUPFD, F_SETFL, F_DUPFD_CLOEXEC
    ),
    **{name: ((_Arg(0, _CHANNEL),),) for name in ("shutdown", "setsockopt", "dup", "dup2", "dup3")},
}


def _numbers(machine: str, allowed: str) -> dict[str, int]:
    rows = (row.split() for row in allowed.replace("\n", " ").split(";") if row.strip())
    return {row[0]: int(row[_COLUMN[machine]]) for row in rows if row[_COLUMN[machine]] != "-"}


def _verdict(verdict: int) -> _Instruction:
    return (_RETURN, 0, 0, verdict)


def _allowed_but(rows: tuple[tuple[_Arg, ...], ...], channel: int) -> list[_Instruction]:
    code: list[_Instruction] = []
    for row in rows:
        body: list[_Instruction] = [_verdict(_DENY)]
        # Backwards, since a jump needs the length of what it skips: a condition that fails skips the rest of its row.
        for condition in reversed(row):
            out, value = len(body), channel if condition.value == _CHANNEL else condition.value
            test = (condition.test, out, 0, value) if condition.negate else (condition.test, 0, out, value)
            masked = [] if condition.mask == _ALL else [(_AND, 0, 0, condition.mask)]
            # struct seccomp_data: nr, arch, instruction_pointer, then six arguments of 64 bits; the low halves first.
            body = [(_LOAD, 0, 0, 16 + 8 * condition.argument + 4 * condition.high), *masked, test, *body]
        code += body
    return [*code, _verdict(_ALLOW)]


def _ranges(numbers: set[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def assemble(machine: str, channel: int, *, shared_files: bool = True, see_locks: bool = False) -> bytes:
    """Assemble the filter as BPF instructions, 8 bytes each.

    Args:
        machine: ``x86_64`` or ``aarch64``.
        channel: The descriptor over which the program speaks with pid 1.
        shared_files: Sessions see the same files, so that ``flock`` is refused.
        see_locks: Allow to ask who has locked a file, as SQLite does.
    """
    numbers = _numbers(machine, _ALLOWED if shared_files else _ALLOWED + _FLOCK)
    # First the processor's call convention: under another one, the same numbers mean other calls.
    code: list[_Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        _verdict(_KILL_PROCESS),
        (_LOAD, 0, 0, 0),
        # Above: calls newer than this list, and the x32 calls of x86_64 with their bit 30.
        (_ABOVE, 0, 1, _LAST_KNOWN),
        _verdict(_MISSING),
        (_EQUAL, 0, 1, _CLONE3),
        _verdict(_MISSING),
    ]
    # Ranges instead of single numbers: the kernel runs the filter at every call.
    for low, high in _ranges({number for name, number in numbers.items() if name not in _REFUSED}):
        code += [(_ABOVE_OR_EQUAL, 0, 2, low), (_ABOVE, 1, 0, high), _verdict(_ALLOW)]
    for name, rows in _REFUSED.items():
        rows = tuple(row for row in rows if not (see_locks and row in _LOOKS_AT_LOCKS))
        # aarch64 lacks some of the older calls.
        if name in numbers:
            body = _allowed_but(rows, channel)
            code += [(_EQUAL, 0, len(body), numbers[name]), *body]
    code.append(_verdict(_DENY))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(instructions: bytes) -> None:
    """Put this process and all that it will start under the filter; ``no_new_privs`` must be set.

    Raises:
        OSError: The kernel refused.
    """
    # By prctl, which needs no number of the seccomp call for each processor.
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = _FilterProgram(len(instructions) // 8, instructions)
    if libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(wanted), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")
