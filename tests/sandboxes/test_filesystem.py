"""What a program finds in its file system, place by place."""

import errno
from pathlib import Path

import pytest

from agentrl.sandboxes import Session

VALUES = {
    "' '.join(sorted(os.listdir('/dev')))": "'fd full null random shm stderr stdin stdout urandom zero'",
    **{"os.listdir('/tmp')": "[]", "os.listdir('/dev/shm')": "[]"},
    "' '.join(sorted(n for n in os.listdir('/') if n[:3] not in ('bin', 'sbi', 'lib')))": "'dev etc opt proc tmp usr'",
    "set(os.listdir('/etc')) <= {'ld.so.cache', 'alternatives'}": "True",
    "[p for p in os.listdir('/proc') if not p.isdigit() and not p.endswith('self')]": "[]",
    **{"open('/dev/null', 'w').write('x')": "1", "len(open('/dev/urandom', 'rb').read(8))": "8"},
    **{"open('/dev/zero', 'rb').read(2)": "b'\\x00\\x00'", "os.stat('/tmp').st_mode & 0o7777 == 0o1777": "True"},
    "os.access('/usr', os.W_OK), os.access('/', os.W_OK), os.access('/opt', os.W_OK)": "(False, False, False)",
    "os.getuid(), os.getgid(), os.getgroups() in ([], [65534], [1000])": "(1000, 1000, True)",
    "os.stat('/tmp').st_uid": "1000",
    "os.statvfs('/tmp').f_flag & os.ST_NOSUID > 0, os.statvfs('/tmp').f_flag & os.ST_NODEV > 0": "(True, True)",
    "os.statvfs('/usr').f_flag & os.ST_RDONLY > 0, os.statvfs('/usr').f_flag & os.ST_NOSUID > 0": "(True, True)",
    "os.statvfs('/proc').f_flag & os.ST_RDONLY > 0": "True",
    "sorted(int(name) for name in os.listdir('/proc') if name.isdigit())": "[1, 2]",
    "os.listdir('/opt/agentrl'), 'agentrl' in __import__('sys').modules": "([], False)",
    f"{str(Path(__file__).parents[2])!r} in open('/proc/self/cmdline').read()": "False",
    "os.readlink('/proc/1/exe') if os.access('/proc/1/exe', os.R_OK) else 'hidden'": "'hidden'",
}
REFUSED = {
    "OSError PermissionError": (
        *("open('/usr/bin/env', 'a')", "open('/dev/new', 'w')", "open('/opt/site/new', 'w')", "open('/new', 'w')"),
        *("open('/proc/self/uid_map', 'w')", "open('/proc/self/oom_score_adj', 'w')", "os.chown('/tmp', 0, 0)"),
        *("os.setuid(0)", "os.setgid(0)", "os.link('/usr/bin/env', '/tmp/env')"),
    ),
    "PermissionError": (
        *("open('/proc/1/mem', 'rb')", "open('/proc/1/environ', 'rb')", "os.listdir('/proc/1/fd')"),
        *("os.readlink('/proc/1/root')", "open('/proc/1/root/etc/shadow')", "os.readlink('/proc/1/ns/mnt')"),
        "os.mknod('/tmp/disk', 0o600 | 0o060000, os.makedev(8, 0))",
        *("os.mknod('/tmp/mem', 0o600 | 0o020000, os.makedev(1, 1))", "os.chroot('/tmp')", "os.setgroups([0])"),
        *("os.nice(-5)", "os.kill(1, 9)", "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"),
    ),
    "FileNotFoundError": (
        *("open('/proc/sys/kernel/core_pattern')", "open('/proc/sysrq-trigger')", "open('/proc/kcore')"),
        *("open('/proc/kmsg')", "open('/proc/3/stat')", "open('/dev/mem')", "open('/dev/tty')", "open('/dev/kvm')"),
        *("os.listdir('/sys')", "os.listdir('/var')", "os.listdir('/boot')"),
        *("os.chdir('..') or os.chdir('/tmp/../home')", "os.symlink('/etc/shadow', '/tmp/s') or open('/tmp/s')"),
    ),
    "ValueError": (
        *(f"resource.setrlimit(resource.RLIMIT_{name}, (-1, -1))" for name in ("NPROC", "AS", "FSIZE", "CPU")),
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
    ),
}
"""By the errors that may come of them."""
ERRORS = {expression: kinds.split() for kinds, expressions in REFUSED.items() for expression in expressions}


@pytest.mark.parametrize("expression", VALUES)
def test_place(session: Session, expression: str) -> None:
    result = session.run(f"import os\n{expression}")
    assert (result.status, result.value) == ("ok", VALUES[expression]), result


@pytest.mark.parametrize("expression", ERRORS)
def test_way_out_that_is_closed(session: Session, expression: str) -> None:
    result = session.run(f"import os, resource\n{expression}")
    assert (result.status, result.state) == ("error", "kept")
    assert result.exc_type in ERRORS[expression], result


def test_read_file_follows_no_link(session: Session) -> None:
    code = "import os\nos.symlink('/etc/shadow', 'a')\nos.symlink('/tmp/f', 'b')\nos.mkdir('d')\nos.symlink('d', 'e')"
    session.run(f"{code}\nfor name in ('f', 'd/f'): open(name, 'w').write('x')")
    assert session.read_file("d/f") == b"x"
    for path in ("a", "/tmp/b", "e/f", "/tmp/e/f"):
        with pytest.raises(OSError) as caught:
            session.read_file(path)
        assert caught.value.errno == errno.ELOOP, path


def test_read_file_takes_regular_files_only_and_does_not_wait(session: Session) -> None:
    session.run(
        "x = 1\nimport os, socket\nos.mkfifo('p')\ns = socket.socket(socket.AF_UNIX)\ns.bind('s')\nos.mkdir('d')"
    )
    expected = {"p": errno.EINVAL, "/dev/zero": errno.EINVAL, "s": errno.ENXIO, "d": errno.EISDIR, ".": errno.EISDIR}
    expected |= {"none": errno.ENOENT, "/etc/passwd": errno.ENOENT}
    for path, number in expected.items():
        with pytest.raises(OSError) as caught:
            session.read_file(path)
        assert caught.value.errno == number, path
    assert session.run("x").value == "1"


def test_read_file_is_bounded(session: Session) -> None:
    session.run("f = open('big', 'wb')\nf.truncate(20 << 20)")
    assert session.read_file("big", 700_000) == bytes(700_000)
    assert session.read_file("big", 0) == b""
