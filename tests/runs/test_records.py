import dataclasses
import json
import math
import tracemalloc
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import TrajectoryError
from agentrl.runs import records
from agentrl.runs.records import TRAINING, EpisodeWriter, Record, read_begun, read_episodes, write_episodes
from agentrl.types import Segment, Stop, ToolRun, Trajectory

from .origins import ORIGIN, Signs

SUFFIXES = (".jsonl", ".jsonl.zst")
TEXTS = st.text(max_size=8)
PARTS = st.dictionaries(TEXTS, st.floats(-1, 1), max_size=3)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def bare(token_ids: tuple[int, ...], task_id: str = "t") -> Trajectory:
    """An episode that ended before its first turn."""
    segments = (Segment("prompt", token_ids),)
    return Trajectory(task_id=task_id, seed=0, segments=segments, rewards=(), stop=Stop.TURN_LIMIT)


def policy(text: str) -> Segment:
    return Segment("policy", ids(text), tuple(-0.25 * at for at in range(len(text))), 3)


@pytest.fixture
def episode() -> Trajectory:
    return Trajectory(
        task_id="train-1/7",
        seed=11,
        segments=(Segment("prompt", ids("2+2?")), policy("call"), Segment("tool", ids("4\n")), policy("4.")),
        rewards=(0.0, 1.0),
        stop=Stop.TERMINATED,
        messages=({"role": "user", "content": "2+2?"}, {"role": "tool", "content": "4\n", "name": "python"}),
        parts={"correct": 1.0},
        tool_runs=(ToolRun(name="python", ok=True, wall_s=0.02, arguments={"code": "2+2", "n": [1, None]}),),
    )


@st.composite
def episodes(draw: st.DrawFn) -> Trajectory:
    # Halves of surrogate pairs are no text: UTF-8 can't hold them, and no tokenizer gives them.
    points = st.characters(exclude_categories=("Cs",)).map(ord)
    segments = [Segment("prompt", tuple(draw(st.lists(points, max_size=5))))]
    for source in draw(st.lists(st.sampled_from(["policy", "tool", "template"]), max_size=4)):
        tokens = tuple(draw(st.lists(points, max_size=5)))
        logprobs = tuple(draw(st.floats(-50, 0)) for _ in tokens)
        swaps = ((len(tokens) - 1, 8),) if len(tokens) > 1 and draw(st.booleans()) else ()
        sampled = (logprobs, 7, draw(st.booleans()), swaps) if source == "policy" else ()
        segments.append(Segment(source, tokens, *sampled))
    turns = sum(segment.trained for segment in segments)
    return Trajectory(
        task_id=draw(TEXTS),
        seed=draw(st.integers(0, 2**63)),
        segments=tuple(segments),
        rewards=tuple(draw(st.floats(-1, 1)) for _ in range(turns)),
        stop=draw(st.sampled_from(Stop)),
        messages=tuple({"role": "user", "content": text} for text in draw(st.lists(TEXTS, max_size=2))),
        parts=draw(PARTS),
        tool_runs=tuple(ToolRun(name=name, ok=False, wall_s=0.5) for name in draw(st.lists(TEXTS, max_size=2))),
        attempt=draw(st.none() | st.integers(0, 99)),
        tags=tuple(draw(st.lists(TEXTS, max_size=2))),
        answer=draw(st.none() | TEXTS),
        usage=draw(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))),
    )


@given(st.lists(episodes(), max_size=4), st.sampled_from(SUFFIXES), st.booleans())
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, played: list[Trajectory], suffix: str, trained: bool
) -> None:
    path = tmp_path_factory.mktemp("records") / f"step-000001{suffix}"
    advantages = [[at - 1.5 for at in range(each.n_sampled)] for each in played]
    write_episodes(path, played, Signs(), ORIGIN, advantages if trained else None)
    records = list(read_episodes(path))
    assert all(record.origin == ORIGIN for record in records)
    assert [record.trajectory for record in records] == played
    for record, given_ in zip(records, advantages, strict=True):
        assert record.advantages == (tuple(given_) if trained and given_ else None)
        assert record.pieces == tuple(tuple(map(chr, each.token_ids)) for each in record.trajectory.segments)


def test_a_line_can_be_read_without_this_package(tmp_path: Path, episode: Trajectory) -> None:
    path = tmp_path / "e.jsonl"
    write_episodes(path, [episode], Signs(), ORIGIN, [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    row = json.loads(path.read_text(encoding="utf-8"))
    assert row["schema"] == 3 and row["return"] == 1.0 and row["stop"] == "terminated"
    numbers = {"logprobs": [0.0, -0.25, -0.5, -0.75], "advantages": [1.0, 2.0, 3.0, 4.0], "version": 3}
    held = {"source": "policy", "token_ids": [*ids("call")], "pieces": ["c", "a", "l", "l"]}
    assert row["segments"][1] == held | numbers
    assert [segment.get("advantages") for segment in row["segments"]][2:] == [None, [5.0, 6.0]]
    assert "logprobs" not in row["segments"][0] and row["messages"][1]["name"] == "python"


@pytest.mark.parametrize("name", sorted(TRAINING))
def test_what_training_made_of_tokens_is_rounded_and_read(tmp_path: Path, episode: Trajectory, name: str) -> None:
    path = tmp_path / "e.jsonl"
    write_episodes(path, [episode], Signs(), ORIGIN, None, [{name: [1 / 3, 1234567.0, 0.0, -1e-9, 1.0, 2.0]}])
    (record,) = read_episodes(path)
    assert record.training == {name: (0.33333, 1234600.0, 0.0, -1e-9, 1.0, 2.0)}
    assert json.loads(path.read_text())["segments"][3]["training"] == {name: [1.0, 2.0]}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_character_breaks_a_line_or_a_file(tmp_path: Path, suffix: str) -> None:
    """Line breaks of any kind stay in their line, and what UTF-8 can't hold is replaced while its ids are kept."""
    text = "\r\n\x0b\x0c\x1c\x85\u2028\u2029"
    hostile = bare((0xD800, *ids(text)), task_id=text)
    write_episodes(tmp_path / f"e{suffix}", [hostile, hostile], Signs(), ORIGIN)
    for record in (read := list(read_episodes(tmp_path / f"e{suffix}"))):
        assert record.trajectory == hostile and record.pieces == (("?", *text),)
    assert len(read) == 2


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_write_replaces_the_old_file_whole_or_not_at_all(tmp_path: Path, episode: Trajectory, suffix: str) -> None:
    path = tmp_path / f"e{suffix}"
    write_episodes(path, [episode] * 5, Signs(), ORIGIN)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="chr"):  # no character has such a number
        write_episodes(path, [episode, bare((-1,))], Signs(), ORIGIN)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    write_episodes(path, [episode], Signs(), ORIGIN)
    assert len(list(read_episodes(path))) == 1 and list(tmp_path.iterdir()) == [path]


def row_of(folder: Path, episode: Trajectory) -> dict[str, Any]:
    """What a line of the episode holds."""
    write_episodes(folder / "row.jsonl", [episode], Signs(), ORIGIN)
    return json.loads((folder / "row.jsonl").read_text(encoding="utf-8"))


def line(folder: Path, episode: Trajectory, **changes: object) -> str:
    return json.dumps(row_of(folder, episode) | changes)


RUN: dict[str, object] = {"name": "x", "ok": True, "wall_s": 1.0, "arguments": {}}


def pack(folder: Path, lines: list[str]) -> Path:
    path = folder / "e.jsonl.zst"
    path.write_bytes(zstandard.compress("".join(row + "\n" for row in lines).encode()))
    return path


def fails(folder: Path, good: Trajectory, bad: str) -> str:
    """Read a good line, then the bad one; the message of the error that it must give."""
    records = read_episodes(pack(folder, [line(folder, good), bad]))
    assert next(records).trajectory == good
    with pytest.raises(TrajectoryError) as caught:
        next(records)
    return str(caught.value)


@pytest.mark.parametrize(("longest", "words"), [(1 << 20, "is longer than 1 MiB"), (1 << 30, "packed 1000 times")])
def test_lines_for_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int, words: str) -> None:
    monkeypatch.setattr(records, "_LONGEST", longest)
    bomb = tmp_path / "e.jsonl.zst"
    with zstandard.open(bomb, "wb") as stream:
        for _ in range(1 << 8):
            stream.write(b" " * (1 << 20))
    tracemalloc.start()
    with pytest.raises(TrajectoryError, match=words):
        next(read_episodes(bomb))
    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("bad", ["", "null", "3", '"text"', "[]", "{}", "{'schema': 1}", '{"sch', "[" * 200_000])
def test_what_is_no_record_is_named_by_line(tmp_path: Path, episode: Trajectory, bad: str) -> None:
    assert fails(tmp_path, episode, bad).startswith("line 2 of ")


HOSTILE: dict[str, tuple[dict[str, Any], ...]] = {
    "episode": (
        *({"schema": 1}, {"origin": {}}, {"origin": {**dataclasses.asdict(ORIGIN), "best_return": "1"}}),
        *({"schema": "2"}, {"stop": "tired"}, {"stop": []}, {"rewards": [1.0]}, {"rewards": [0.0, math.nan]}),
        *({"rewards": [0.0, math.inf]}, {"rewards": ["0", "1"]}, {"rewards": None}, {"segments": None}),
        *({"segments": []}, {"segments": "prompt"}, {"segments": [1]}, {"tool_runs": [1]}),
        *({"tool_runs": [{"name": "x"}]}, {"tool_runs": [RUN | {"shell": "rm"}]}, {"tool_runs": [RUN | {"name": 3}]}),
        *({"tool_runs": [RUN | {"arguments": 3}]}, {"messages": ["hi"]}, {"messages": [{"role": "user"}]}),
        *({"messages": [{"role": "user", "content": 3}]}, {"messages": [{"role": "tool", "content": "", "name": 3}]}),
        *({"messages": 3}, {"rewards": [0.0, 10**400]}, {"parts": 3}, {"seed": "x"}, {"task_id": 3}),
        *({"schema": 2}, {"attempt": "1"}, {"tags": "ab"}, {"answer": 3}, {"tags": [1]}),
        *({"usage": [1]}, {"usage": [1, "2"]}),
    ),
    "segment": (
        *({"source": "user"}, {"source": []}, {"source": "tool"}, {"logprobs": None}, {"logprobs": [0.0]}),
        *({"logprobs": [0.1] * 4}, {"logprobs": [math.nan] * 4}, {"logprobs": ["0"] * 4}, {"version": None}),
        *({"swaps": bad} for bad in (None, 3, [[0]], [[1, "3"]], [[0, 3]], [[1, 3], [9, 4]])),
        *({"training": 3}, {"training": {"entropy": [math.nan] * 4}}, {"training": {"entropy": ["0"] * 4}}),
        *({"pieces": None}, {"advantages": 3}, {"pieces": ["a"]}, {"pieces": [1, 2, 3, 4]}, {"token_ids": "call"}),
    ),
}


@pytest.mark.parametrize(("part", "changes"), [(part, changes) for part in HOSTILE for changes in HOSTILE[part]])
def test_hostile_fields_are_refused(tmp_path: Path, episode: Trajectory, part: str, changes: dict[str, Any]) -> None:
    row = row_of(tmp_path, episode)
    (row if part == "episode" else row["segments"][1]).update(changes)
    assert "is no episode" in fails(tmp_path, episode, json.dumps(row))


def test_advantages_of_some_tokens_and_unknown_fields_are_passed_over(tmp_path: Path, episode: Trajectory) -> None:
    segments = row_of(tmp_path, episode)["segments"]
    segments[1]["advantages"] = [0.5]
    (record,) = read_episodes(pack(tmp_path, [line(tmp_path, episode, segments=segments, mood="good")]))
    pieces = tuple(tuple(map(chr, segment.token_ids)) for segment in episode.segments)
    assert record == Record(trajectory=episode, origin=ORIGIN, pieces=pieces)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [(".jsonl", b"\xff\xfe\n"), *((".jsonl.zst", damaged) for damaged in (b"text", b"\xff\0", b"\x28\xb5\x2f\xfd\0"))],
)
def test_a_damaged_file_is_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"e{suffix}"
    path.write_bytes(content)
    with pytest.raises(TrajectoryError, match=r"is no episode: \w"):
        list(read_episodes(path))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_stream_that_was_cut_off_is_refused(tmp_path: Path, episode: Trajectory, share: float) -> None:
    path = pack(tmp_path, [line(tmp_path, episode)] * 1000)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(TrajectoryError):
        list(read_episodes(path))


def test_plain_files_are_closed_when_reading_stops_early(tmp_path: Path, episode: Trajectory) -> None:
    write_episodes(tmp_path / "e.jsonl", [episode] * 3, Signs(), ORIGIN)
    records = read_episodes(tmp_path / "e.jsonl")
    next(records)
    del records  # an unclosed file is a warning, and warnings are errors here


def begin(path: Path, episode: Trajectory, head: bytes = b"", *, seeds: range = range(4)) -> EpisodeWriter:
    writer = EpisodeWriter(path, Signs(), head, ORIGIN, {"seed": 3})
    for seed in seeds:
        writer.add(dataclasses.replace(episode, seed=seed))
    return writer


def seeds_of(records: Iterable[Record]) -> list[int]:
    return [record.trajectory.seed for record in records]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_episode_is_in_the_file_once_it_is_added(tmp_path: Path, episode: Trajectory, suffix: str) -> None:
    path = tmp_path / f"e{suffix}"
    writer = begin(path, episode, seeds=range(0))
    for seed in range(3):
        writer.add(dataclasses.replace(episode, seed=seed))
        assert seeds_of(read_begun(path)[1]) == list(range(seed + 1)), "whatever becomes of the writer"
    writer.close()
    (record, *_), whole = list(read_episodes(path)), seeds_of(read_episodes(path))
    assert whole == [0, 1, 2] and (record.origin, record.evaluation) == (ORIGIN, {"seed": 3})
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_was_cut_off_anywhere_goes_on(tmp_path: Path, episode: Trajectory, suffix: str) -> None:
    path = tmp_path / f"e{suffix}"
    begin(path, episode).close()
    data = path.read_bytes()
    for length in {*range(0, len(data), 97), len(data) - 3, len(data) - 1, len(data)}:
        path.write_bytes(data[:length])
        head, records = read_begun(path)
        assert seeds_of(records) == list(range(len(records))) and head.count(b"\n") == len(records)
        begin(path, episode, head, seeds=range(len(records), 5)).close()
        assert seeds_of(read_episodes(path)) == [0, 1, 2, 3, 4]
        if suffix.endswith("zst"):
            unpacked = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
            assert unpacked.count(b"\n") == 5, "one frame, as other readers expect"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("text", [b"no episodes\nat all\n", b'{"schema": 3}\n', b"\xff\n"])
def test_what_holds_no_episodes_is_not_gone_on_with(tmp_path: Path, suffix: str, text: bytes) -> None:
    path = tmp_path / f"e{suffix}"
    path.write_bytes(zstandard.compress(text) if suffix.endswith("zst") else text)
    with pytest.raises(TrajectoryError, match="holds something else than episodes"):
        read_begun(path)
    assert read_begun(tmp_path / f"none{suffix}") == (b"", [])


def test_common_readers_open_the_file(tmp_path: Path, episode: Trajectory, require: Callable[..., None]) -> None:
    require(all(map(find_spec, ("pandas", "datasets"))), "needs pandas and datasets: pip install 'agentrl[math]'")
    import datasets
    import pandas

    path = tmp_path / "e.jsonl.zst"
    tried = [dataclasses.replace(episode, attempt=number, tags=("level:3",), answer="4") for number in range(3)]
    write_episodes(path, tried, Signs(), ORIGIN)
    frame = pandas.read_json(path, lines=True)
    assert frame.attempt.tolist() == [0, 1, 2] and frame.groupby("task_id").success.mean().tolist() == [1.0]
    loaded: Any = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["tags"][:] == [["level:3"]] * 3 and loaded[0]["segments"][1]["pieces"] == list("call")
    assert [record.trajectory for record in read_episodes(str(path))] == tried
