from agentrl.sandboxes import Sandbox


def test_ok_has_output_and_value(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (result.status, result.stdout, result.stderr, result.value) == ("ok", "out\n", "err\n", "42")
    assert (result.exc_type, result.traceback, result.exit_code, result.signal) == (None, None, None, None)
    assert (result.truncated, result.attempts, result.backend) == (False, 1, "local")
    assert 0 < result.cpu_s < 2 and result.wall_s > 0 and result.queue_s > 0 and result.max_rss > 1 << 20


def test_error_is_cut_to_the_programs_own_frames(sandbox: Sandbox) -> None:
    result = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert (result.status, result.exc_type) == ("error", "ZeroDivisionError")
    lines = (result.traceback or "").splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    frames = ['  File "<cell 1>", line 3, in <module>', '  File "<cell 1>", line 2, in f']
    assert [line for line in lines if "File" in line] == frames
    assert "    return 1 / 0" in lines and lines[-1] == "ZeroDivisionError: division by zero"


def test_syntax_error_shows_no_frames_of_ours(sandbox: Sandbox) -> None:
    trace = sandbox.run("def (:").traceback
    assert trace is not None and "/opt" not in trace and "<cell 1>" in trace


def test_chained_exceptions_show_both(sandbox: Sandbox) -> None:
    trace = sandbox.run("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e").traceback
    assert trace is not None
    assert trace.index("ZeroDivisionError") < trace.index("direct cause") < trace.index("KeyError: 'k'")
