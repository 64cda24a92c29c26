"""What ``read_file`` takes, and what nothing of the host's file system reaches a program by."""

import errno
from pathlib import Path

import pytest

from agentrl.sandboxes import Session


def test_the_command_line_names_no_folder_of_the_host(session: Session) -> None:
    assert session.run(f"{str(Path(__file__).parents[2])!r} in open('/proc/self/cmdline').read()").value == "False"


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
