"""How large a page of ``agentrl view`` is, and how soon a real Chromium shows, searches and walks it.

The episodes are made up: words as frequent as in a natural text, and numbers of training of each sampled token.
"""

import random
import shutil
import sys
import tempfile
from pathlib import Path

from measures import Measure, command_line, measure_table, say, timed

from agentrl.runs.records import write_episodes
from agentrl.runs.report import write_view
from agentrl.types import Segment, Stop, ToolRun, Trajectory

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.runs.origins import ORIGIN
from tests.runs.report.browser import Browser

EXAMPLES = """examples:
  viewer.py            both sizes: minutes
  viewer.py --quick    does it still run? seconds
"""
OPEN_S = 3.0
"""What the project promises."""
FILES = 20
FILLED = "Boolean(document.querySelector('#columns .chunk')?.textContent)"


class Words:
    """A vocabulary of made-up words and line ends."""

    def __init__(self, noise: random.Random) -> None:
        letters = "etaoinshrdlu"
        self.pieces = [" " + "".join(noise.choices(letters, k=noise.randint(1, 7))) for _ in range(20_000)]
        self.pieces[10] = "\n"

    def decode(self, token_ids: int | list[int], **_: object) -> str:
        """Return the text of tokens."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return "".join(self.pieces[token_id] for token_id in ids)


def episode(noise: random.Random, number: int, tokens: int, turns: int) -> Trajectory:
    """Make an episode of so many tokens in so many turns; half of a turn is its tool's answer."""

    def ids(count: int) -> tuple[int, ...]:
        return tuple(min(19_999, int(noise.paretovariate(0.6)) - 1) for _ in range(count))

    half = max(1, tokens // (2 * turns))
    segments = [Segment("prompt", ids(half))]
    for turn in range(turns):
        logprobs = tuple(-noise.expovariate(2.0) for _ in range(half))
        segments += [Segment("tool", ids(half))] if turn else []
        segments.append(Segment("policy", ids(half), logprobs, 1))
    runs = (ToolRun(name="python", ok=True, wall_s=0.03, arguments={"code": "print(1)"}),) * (turns - 1)
    won = noise.random() < 0.5
    return Trajectory(
        task_id=f"train-1:{number // 8}", seed=number, segments=tuple(segments), tool_runs=runs,
        rewards=(0.0,) * (turns - 1) + (float(won),), stop=Stop.TERMINATED,
    )  # fmt: skip


def make_run(folder: Path, episodes: int, tokens: int, turns: int) -> None:
    """Write a run folder whose steps hold so many episodes in all; as what is made is slow, all steps are alike."""
    noise = random.Random(0)
    files = min(FILES, episodes)
    many = [episode(noise, number, tokens, turns) for number in range(episodes // files)]
    advantages = [[noise.gauss(0, 0.5) for _ in range(trajectory.n_sampled)] for trajectory in many]
    names = ("old_logp", "entropy", "log_ratio", "cumulative_log_ratio", "realized_energy", "baseline")
    training = [{name: [noise.gauss(0, 0.5) for _ in row] for name in names} for row in advantages]
    (folder / "episodes").mkdir(parents=True)
    path = folder / "episodes" / "step-000001.jsonl.zst"
    write_episodes(path, many, Words(noise), ORIGIN, advantages, training)
    for step in range(2, files + 1):
        shutil.copy(path, path.with_name(f"step-{step:06d}.jsonl.zst"))


def measured(browser: Browser, folder: Path, episodes: int, tokens: int, turns: int) -> list[Measure]:
    """Make a run and its page, open it, and do what a reader does."""
    name = f"{episodes} x {tokens} tokens in {turns} turns"
    say(f"{name}: making the run")
    make_run(folder, episodes, tokens, turns)
    say(f"{name}: writing its page")
    page = folder / "view.html"
    writing = timed(lambda: write_view([folder], page, every=True))

    def act(script: str, until: str) -> float:
        return timed(lambda: (browser.ask(f"{script}, 1"), browser.until(until)))

    def search(text: str) -> float:
        script = f"setMode(mode), filters.text.value = '{text}', filter().then(() => window.found = '{text}')"
        return act(script, f"window.found === '{text}'")

    def opening() -> None:
        browser.open(page)
        browser.until("document.body?.className === 'overview'")
        browser.click("#to-episodes")
        browser.until(FILLED)

    opened = timed(opening)
    loaded = opened + timed(lambda: browser.until("document.readyState === 'complete'"))
    walked = act("choose(at + 1)", f"columns[0].number === shown[at] && {FILLED}")
    jumped = act(f"goTo({turns})", "Boolean([...document.querySelectorAll('.chunk')].at(-1).firstChild)")
    shaded = act("setMode('advantage')", "document.querySelectorAll('#columns .policy bdi').length")
    searched, again = search("no such text"), search("nor such")
    size = page.stat().st_size
    figures = {
        "page": f"{size / 1e6:.0f} MB, {size / episodes / tokens:.1f} bytes a token",
        **{"written in": f"{writing:.0f} s", "read to its end after": f"{loaded:.1f} s"},
        **{"next episode": f"{walked:.2f} s", "last turn": f"{jumped:.2f} s", "tokens shaded": f"{shaded:.2f} s"},
        **{"first search of texts": f"{searched:.1f} s", "second search": f"{again:.1f} s"},
    }
    shown = Measure(name=f"{name}: first episode shown", value=f"{opened:.1f} s", target="< 3 s", met=opened < OPEN_S)
    return [shown, *(Measure(name=f"{name}: {what}", value=value) for what, value in figures.items())]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = command_line(__doc__, EXAMPLES)
    parser.add_argument("--quick", action="store_true", help="a test that all runs, no timing")
    quick = parser.parse_args().quick
    sizes = ((20, 60, 3), (1, 400, 50)) if quick else ((2000, 4000, 8), (1, 128_000, 500))
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        tables = [measured(browser, Path(folder) / f"run-{size[1]}", *size) for size in sizes]
    print(measure_table([measure for rows in tables for measure in rows]))


if __name__ == "__main__":
    main()
