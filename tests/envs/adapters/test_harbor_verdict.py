"""What a verifier gets of an agent's container, and what reward files mean: hostile tar streams and texts."""

import io
import shutil
import tarfile
from collections.abc import Mapping

import pytest

from agentrl.envs.adapters.harbor import layer
from agentrl.envs.adapters.harbor.carry import Changes, Parcel, Scope, is_private, scope_of, select
from agentrl.envs.adapters.harbor.verdict import FILES, MOST_REWARD, UnreadableError, parts_of, regular
from agentrl.sandboxes.docker.task_engine import CountedStream, TooLargeError

APP = Scope(tops=("/app",))
REG, DIR, SYM, LNK, PIPE = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE


def tar(*members: tuple[str, bytes, str]) -> io.BytesIO:
    """A tar of members: name, type, and the content of a file or the target of a link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        for name, kind, text in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.uid = kind, 0o6755, 1000
            entry.size, entry.linkname = (len(text), "") if kind == REG else (0, text)
            out.addfile(entry, io.BytesIO(text.encode()))
    return io.BytesIO(buffer.getvalue())


def names(parcel: Parcel) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(parcel.finish())) as out:
        assert all(member.mode == 0o755 and member.uid == 1000 for member in out), "no set-user-id bit"
        return out.getnames()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/usr/bin/x", "/lib", "/tests/t", "/logs/verifier/reward.txt", "/root/.bashrc"]
)
def test_private_paths_are_never_carried(path: str) -> None:
    assert is_private(path) and not Scope(tops=("/",)).has(path)


@pytest.mark.parametrize("path", ["/app", "/app/usr", "/root/repo/.git", "/home/me/x", "/library", "/var/etc"])
def test_other_paths_may_be(path: str) -> None:
    assert not is_private(path)


def test_search_paths_of_the_image_are_guarded() -> None:
    env = ["PATH=/app/.venv/bin:/usr/bin:/app/tools", "PYTHONPATH=/app:/app/lib", "HOME=/app/home"]
    scope = scope_of(["/app"], env)
    assert scope.guarded == ("/app/.venv", "/app/.venv/bin", "/app/lib", "/app/tools")
    assert scope.has("/app/x") and not scope.has("/app/.venv/lib/site.pth")


def test_only_changes_below_the_scope_are_selected_and_no_unchanged_folder() -> None:
    changes = {"/app": 0, "/app/new": 1, "/app/new/x": 1, "/app/old": 0, "/app/old/changed": 0, "/app/old/gone": 2}
    changes |= {"/app/again": 2, "/app/again/x": 1, "/tests": 1, "/usr/bin/python3": 0, "/apple": 1, "/app/mode": 0}
    selected = select(changes, APP)
    assert selected == Changes(
        deleted=("/app/again", "/app/old/gone"),
        copied=("/app/again", "/app/new", "/app/old/gone"),
        modified=("/app/mode", "/app/old/changed"),
    )


def test_what_is_carried_keeps_owners_and_loses_pipes_and_the_way_out() -> None:
    parcel = Parcel(APP)
    parcel.add(
        "/app/d",
        tar(
            *(("d", DIR, ""), ("d/file", REG, "text"), ("d/hard", LNK, "d/file"), ("d/near", SYM, "file")),
            *(("d/up", SYM, "../other"), ("d/python", SYM, "/usr/bin/python3"), ("d/pipe", PIPE, "")),
            *(("d/key", SYM, "/tests/key"), ("d/root", SYM, "/"), ("d/far", SYM, "../../tests/key")),
            *(("d/twist", SYM, "near/../../../tests/key"), ("d/last", SYM, "near/.."), ("d/proc", SYM, "/proc/1/root")),
            *(("d/dots", SYM, "/app/../tests"), ("d/foreign", LNK, "../etc/passwd"), ("d/../../etc/cron", REG, "x")),
            *(("/etc/passwd", REG, "x"), ("e", REG, "x"), ("d/near/inside", REG, "x"), ("d/file/below", REG, "x")),
        ),
    )
    parcel.add("/app/single", tar(("single", REG, "1")))
    parcel.add("/app/folder", tar(("folder", DIR, ""), ("folder/unchanged", REG, "1")), alone=True)
    assert names(parcel) == [
        *(f"app/{name}" for name in ("d", "d/file", "d/hard", "d/near", "d/up", "d/python", "single", "folder"))
    ]


def test_a_stream_is_counted_and_never_read_beyond_its_limit() -> None:
    zeros = iter([bytes(1 << 16)] * 3)
    stream = CountedStream(zeros, 2 << 16)
    assert len(stream.read(100)) == 100 and stream.left == 1 << 16
    with pytest.raises(TooLargeError):
        stream.read(3 << 16)
    with pytest.raises(tarfile.TarError):
        Parcel(APP).add("/app/x", io.BytesIO(b"\xff" * 2000))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("reward.txt", SYM, "/app/x")], "no regular file"),
        ([("reward.txt", DIR, "")], "no regular file"),
        ([("reward.txt", PIPE, "")], "no regular file"),
        ([], "no regular file"),
        ([("reward.txt", REG, "1" * (MOST_REWARD + 1))], "more than 64 KiB"),
    ],
)
def test_a_reward_file_is_a_small_regular_file(members: list[tuple[str, bytes, str]], message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        regular(tar(*members))
    assert regular(tar(("reward.txt", REG, "0.5\n"))) == b"0.5\n"


def files(json: str | None = None, txt: str | None = None) -> Mapping[str, bytes]:
    return {path: text.encode() for path, text in zip(FILES, (json, txt), strict=True) if text is not None}


@pytest.mark.parametrize(
    ("json", "txt", "reward"),
    [
        *((None, " 1\n", 1.0), (None, "0.25", 0.25), ('{"reward": 0.5}', None, 0.5), ('{"reward": true}', None, 1.0)),
        *(('{"reward": 1}', "1.0", 1.0), ('{"reward": 0, "seconds": 12.5}', None, 0.0), (None, "1e-1", 0.1)),
    ],
)
def test_a_reward_is_read(json: str | None, txt: str | None, reward: float) -> None:
    assert parts_of(files(json, txt), {"reward": 1.0}) == {"reward": reward}


@pytest.mark.parametrize(
    ("json", "txt", "message"),
    [
        (None, None, "there is no reward file"),
        (None, "", "no number"),
        *((None, text, "no number") for text in ("nan", "inf", "1_0", "1 0", "0x1", "½", "one", "1\n1")),
        *((None, text, "no number from 0 to 1") for text in ("1000000", "-0.1", "1.0000001")),
        (None, "1e999", "'reward' is inf"),
        *((text, None, "no JSON") for text in ("", "{", "[" * 10000, '{"reward": 1} 2')),
        *((text, None, "no table") for text in ("1", "[1]", "null")),
        *((text, None, "no number") for text in ('{"reward": "1"}', '{"reward": null}', '{"reward": [1]}')),
        *(
            (f'{{"reward": {text}}}', None, "is nan|is inf|is -inf")
            for text in ("NaN", "Infinity", "-Infinity", "9" * 400)
        ),
        ('{"reward": 0, "reward": 1}', None, "there twice"),
        ('{"reward": 1000000}', None, "from 0 to 1"),
        ('{"score": 1}', None, "no part 'reward', only score"),
        ('{"reward": 0}', "1", "different things"),
        ('{"score": 1}', "1", "different things"),
    ],
)
def test_what_is_no_reward_says_why(json: str | None, txt: str | None, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        parts_of(files(json, txt), {"reward": 1.0})


def test_parts_are_those_that_the_environment_declares() -> None:
    text = files('{"style": 0.5, "tests": 1, "bonus": 1}')
    assert parts_of(text, {"style": 1.0, "tests": 2.0}) == {"style": 0.5, "tests": 1.0}


def test_the_offline_layer_has_pytest_and_programs_that_fetch_nothing(request: pytest.FixtureRequest) -> None:
    folder = layer.build_layer()
    request.addfinalizer(lambda: shutil.rmtree(folder))
    assert {path.name for path in (folder / "bin").iterdir()} == {"curl", "apt-get", "uvx"}
    assert (folder / "lib/_pytest").is_dir() and all(path.stat().st_mode & 0o111 for path in (folder / "bin").iterdir())
