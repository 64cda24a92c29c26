import pytest

from agentrl.sandboxes import Limits, Sandbox, open_sandbox


def test_ok_has_output_and_value(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (result.status, result.stdout, result.stderr, result.value) == ("ok", "out\n", "err\n", "42")
    assert (result.exc_type, result.traceback, result.exit_code, result.signal) == (None, None, None, None)
    assert (result.truncated, result.attempts, result.backend) == (False, 1, "local")
    assert 0 < result.cpu_s < 2 and result.wall_s > 0 and result.queue_s > 0 and result.max_rss > 1 << 20


def test_error_is_cut_to_the_programs_own_frames(sandbox: Sandbox) -> None:
    result = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert (result.status, result.exc_type) == ("error", "ZeroDivisionError")
    assert result.traceback is not None
    lines = result.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if "File" in line] == [
        '  File "<cell 1>", line 3, in <module>',
        '  File "<cell 1>", line 2, in f',
    ]
    assert "    return 1 / 0" in lines
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_syntax_error_shows_no_frames_of_ours(sandbox: Sandbox) -> None:
    result = sandbox.run("def (:")
    assert (result.status, result.exc_type) == ("error", "SyntaxError")
    assert result.traceback is not None and "/opt" not in result.traceback and "<cell 1>" in result.traceback


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("import sys; sys.exit()", 0), ("exit(3)", 3), ("import sys; sys.exit('bye')", 1), ("import os; os._exit(9)", 9)],
)
def test_exit_is_never_ok(sandbox: Sandbox, code: str, exit_code: int) -> None:
    result = sandbox.run(code)
    assert (result.status, result.exit_code) == ("exit", exit_code)


def test_exit_message_goes_to_stderr(sandbox: Sandbox) -> None:
    assert sandbox.run("raise SystemExit('bye')").stderr == "bye\n"


def test_a_sleep_longer_than_the_cpu_limit_is_fine(sandbox: Sandbox) -> None:
    assert sandbox.run("import time\ntime.sleep(0.4)", timeout=0.2).status == "ok"


def forks(count: int, body: str) -> str:
    """A program whose children run ``body`` while it waits."""
    return f"import os, time\nfor _ in range({count}):\n    if os.fork() == 0:\n        {body}\ntime.sleep(0.5)"


def test_cpu_of_children_counts(sandbox: Sandbox) -> None:
    result = sandbox.run(forks(3, "while True: pass") + "\ntime.sleep(60)", timeout=0.5)
    assert result.status == "timeout" and result.cpu_s >= 0.4


def test_memory_of_all_processes_together_is_limited() -> None:
    with open_sandbox(limits=Limits(memory_bytes=128 << 20)) as small:
        result = small.run(forks(8, "x = b'x' * (30 << 20); time.sleep(9)") + "\ntime.sleep(9)")
    assert result.status == "memory"
    assert result.max_rss > 128 << 20


def test_stdin_and_files(sandbox: Sandbox) -> None:
    code = "import helper\nprint(helper.x, input(), input(), open('d/b.bin', 'rb').read())"
    files = {"helper.py": "x = 5", "d/b.bin": b"\x00\xff"}
    assert sandbox.run(code, stdin="one\ntwo é\n", files=files).stdout == "5 one two é b'\\x00\\xff'\n"
    assert sandbox.run("input()").exc_type == "EOFError"


def test_files_that_do_not_fit_are_the_programs_error(sandbox: Sandbox) -> None:
    result = sandbox.run("1", files={"/usr/x": "no"})
    assert (result.status, result.exc_type) == ("error", "OSError")
