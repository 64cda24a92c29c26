"""Throw hostile texts at what reads a model's words: the parsers of every dialect, and the renderer.

An input is bytes; a byte from 128 on stands for a mark that means something to a dialect, so that chance writes calls.
What must hold: nothing raises but errors of our own where they are announced, what is written is read again as it was,
and time grows no faster than the input. The smallest input that breaks it is saved, and the exit code is 1.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Target = Callable[[str], None]
MARKS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "```python\n", "```add\n", "\n```\n", "```", "<python>"),
    *("</python>", "<add>", "</add>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": ', '"arguments": ', '"parameters": '),
    *('"python"', '"add"', '{"code": ', '{"a": 1', '"b": [1, 2]', "<function=add>", "<parameter=b>", "</parameter>"),
    *("</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "\\u003c", "\\ud800", "\ud800", "\\"),
    *("NaN", "-Infinity", "1e999", "9" * 1100, "[" * 70, "]" * 70, "{" * 70, '{"":' * 70, "null", "True", "\r\n", "\n"),
    *(
        "}",
        "}}",
        ", ",
        ";",
        '"',
        "'",
        "é",
        "🙂",
        "\u2028",
        "\x00",
        "<|im_end|>",
        "<|im_start|>",
        "Zq0x0xq0Z",
        "{{ 7 }}",
    ),
]
REPEATS = {255: 2000, 254: 40, 253: 2}
"""Last byte to how often an input is repeated, once by default: long texts find what is not linear."""
LONGEST = 200_000
"""Most characters of a text."""
SECONDS, SECONDS_PER_CHARACTER = 0.3, 1e-5


def main() -> int:
    """Fuzz the targets one after another, each in a process of its own."""
    arguments = _arguments()
    if arguments.worker:  # atheris sees only what is imported later
        return work(arguments, arguments.target[0])
    names = arguments.target or sorted(targets())
    if unknown := sorted({*names} - {*targets()}):
        sys.exit(f"there is no target {unknown[0]!r}: choose from {', '.join(targets())}")
    failed = 0
    for number, name in enumerate(names):
        share = [f"--inputs={arguments.inputs // len(names)}", f"--seconds={arguments.seconds / len(names)}"]
        rest = [f"--engine={arguments.engine}", f"--seed={arguments.seed + number}", f"--out={arguments.out}"]
        failed |= subprocess.run([sys.executable, __file__, "--worker", f"--target={name}", *share, *rest]).returncode
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("random", "atheris"), default="random", help="atheris follows coverage")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many, over all targets (default: 1000000)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="most seconds, over all targets (default: 3600)")
    parser.add_argument("--target", action="append", metavar="NAME", help="this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of chance (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="where a failing input is saved")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def targets() -> Mapping[str, Callable[[], Target]]:
    """What can be fuzzed: a name, and what makes the target once its process runs."""
    from agentrl.dialects import DIALECTS

    return {
        **{f"parse-{name}": lambda name=name: parsing(name) for name in DIALECTS},
        **{f"write-{name}": lambda name=name: writing(name) for name in DIALECTS},
        "render": rendering,
    }


def tools() -> list[Any]:
    """One tool that takes a text, and one that takes other things."""
    from agentrl.tools import tool

    @tool
    def python(code: str) -> str:
        """Run."""
        return code

    @tool
    def add(a: int, b: list[int] | None = None, note: str = "") -> str:
        """Add."""
        return note

    return [python, add]


def parsing(name: str) -> Target:
    """The calls are numbered, and each has readable arguments or an error."""
    from agentrl.dialects import get_dialect

    dialect = get_dialect(name, tools())

    def run(text: str) -> None:
        for number, call in enumerate(dialect.parse(text)):
            assert call.id == f"call_{number}" and len(call.name) <= 128 and len(call.error) <= 400, call
            if name not in ("fence", "xml", "native-qwen3-coder", "native-glm"):  # those hand texts on as they are
                json.dumps(dict(call.arguments), allow_nan=False, ensure_ascii=False).encode()

    return run


def writing(name: str) -> Target:
    """What is written is read again as it was, or is refused with an error of our own."""
    from agentrl.dialects import get_dialect
    from agentrl.errors import DialectError

    dialect = get_dialect(name, tools())

    def run(text: str) -> None:
        for tool, arguments in (("python", {"code": text}), ("add", {"a": 1, "note": text, text[:3]: [text]})):
            try:
                written = dialect.render(tool, arguments)
            except DialectError:
                continue
            (call,) = dialect.parse(f"Hm.\n{written}\nHm.")
            assert (call.name, call.arguments, call.error) == (tool, arguments, ""), call

    return run


def rendering() -> Target:
    """A prompt and an extension: control tokens only where the template put them, and contents that come back."""
    from agentrl.render import Renderer
    from agentrl.tiny import CHAT_TEMPLATE, make_tokenizer

    renderer = Renderer(make_tokenizer([CHAT_TEMPLATE, "system user assistant tool"]))
    control = set(renderer.tokenizer.all_special_ids)  # pyright: ignore
    plain = {"role": "user", "content": "x"}

    def ids(content: str) -> list[int]:
        result = {"role": "tool", "content": content, "name": content[:80], "tool_call_id": "call_0"}
        segments = [renderer.prompt([{**plain, "content": content}]), *renderer.extend([], [result, plain])]  # pyright: ignore
        return [token for segment in segments for token in segment.token_ids]

    wanted = [token for token in ids("x") if token in control]

    def run(text: str) -> None:
        assert [token for token in ids(text) if token in control] == wanted, "a content became a control token"
        clean = text.encode("utf-8", "replace").decode()
        assert renderer.text(renderer.turn(clean)) == clean, "a turn's text does not come back"

    return run


def text_of(data: bytes) -> str:
    """The text that ``data`` stands for."""
    if not data:
        return ""
    text = "".join(chr(byte) if byte < 128 else MARKS[byte % len(MARKS)] for byte in data[:-1])
    return (text * REPEATS.get(data[-1], 1))[:LONGEST]


def problem(target: Target, data: bytes) -> str:
    """What ``data`` breaks; empty where all is well."""
    text = text_of(data)
    allowed = SECONDS + SECONDS_PER_CHARACTER * len(text)
    try:
        # Measured again where it was slow: a collection of garbage or a neighbour may have been the reason.
        for _ in range(3):
            began = time.process_time()
            target(text)
            if time.process_time() - began <= allowed:
                return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return f"slower than {allowed:.2f} s of CPU time for {len(text)} characters"


def shrink(target: Target, data: bytes, seconds: float = 20.0) -> bytes:
    """Leave pieces out, larger ones first, as long as something breaks."""
    until = time.monotonic() + seconds
    size = len(data) // 2
    while size and time.monotonic() < until:
        for start in range(0, len(data), size):
            less = data[:start] + data[start + size :]
            if problem(target, less):
                data = less
                break
        else:
            size //= 2
    return data


def mutated(chance: random.Random, corpus: list[bytes]) -> bytes:
    """Random bytes, or a change of what was tried before."""
    if not corpus or chance.random() < 0.3:
        return chance.randbytes(chance.randrange(40))
    data = bytearray(chance.choice(corpus))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        other = chance.choice(corpus)
        piece = chance.choice([chance.randbytes(1), other[at : at + chance.randrange(8)], data[:at]])
        data[at : at + chance.choice((0, 0, len(piece), 3))] = piece
    return bytes(data[:200])


class Session:
    """One target's run: counts, shows progress, and ends the process at the first failure."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.target = targets()[name]()
        self.name, self.out, self.inputs = name, arguments.out, arguments.inputs
        self.began = self.shown = time.monotonic()
        self.until = self.began + arguments.seconds
        self.done = 0

    def ended(self) -> bool:
        """Whether inputs or time are used up."""
        return self.done >= self.inputs or time.monotonic() >= self.until

    def one(self, data: bytes) -> None:
        """Try one input."""
        self.done += 1
        if why := problem(self.target, data):
            small = shrink(self.target, data)
            self.out.mkdir(parents=True, exist_ok=True)
            place = self.out / f"{self.name}.json"
            place.write_text(json.dumps({"target": self.name, "why": why, "text": text_of(small)}))
            print(f"\n{self.name}: {problem(self.target, small) or why}\nsaved in {place}", file=sys.stderr, flush=True)
            os._exit(1)  # atheris would call any other way out a crash of its own
        if time.monotonic() - self.shown > 1:
            self.shown = time.monotonic()
            print(f"\r{self}", end="", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return f"{self.name}: {self.done} inputs in {time.monotonic() - self.began:.0f} s"


def work(arguments: argparse.Namespace, name: str) -> int:
    """Fuzz one target in this process."""
    session = with_atheris(arguments, name) if arguments.engine == "atheris" else at_random(arguments, name)
    print(f"\r{session}, nothing found", file=sys.stderr, flush=True)
    sys.stderr.flush()
    os._exit(0)


def at_random(arguments: argparse.Namespace, name: str) -> Session:
    """Mutate what was tried before."""
    session, chance, corpus = Session(name, arguments), random.Random(arguments.seed), list[bytes]()
    while not session.ended():
        data = mutated(chance, corpus)
        session.one(data)
        if chance.random() < 0.02:
            corpus = [*corpus[-500:], data]
    return session


def with_atheris(arguments: argparse.Namespace, name: str) -> Session:
    """Let atheris follow which lines an input reaches."""
    import atheris

    with atheris.instrument_imports(include=["agentrl.dialects", "agentrl.render"]):
        session = Session(name, arguments)

    def one(data: bytes) -> None:
        session.one(data)
        if session.ended():
            print(f"\r{session}, nothing found", file=sys.stderr, flush=True)
            os._exit(0)

    atheris.Setup([sys.argv[0], f"-seed={arguments.seed + 1}", "-max_len=200", "-verbosity=0"], one)
    atheris.Fuzz()
    return session


if __name__ == "__main__":
    sys.exit(main())
