"""The page in a real browser: what is clicked and pressed does what it says, and its policy holds."""

import base64
import json
import math
import random
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from agentrl.runs.records import write_episodes
from agentrl.runs.report import write_report, write_view
from agentrl.segments import complete_rows
from agentrl.types import Segment, Stop, ToolRun, Trajectory

from ...forests import forest
from ..origins import ORIGIN, Numerals
from .browser import FILLED, Browser
from .conftest import ANSWER, CALL, GUESS, SYSTEM, Play, Save, View
from .test_report import HOSTILE

pytestmark = pytest.mark.slow
PNG = b"\x89PNG\r\n\x1a\n"
TOKENS = "[...document.querySelectorAll('#columns .policy bdi')]"
OPTIONS = "[...document.querySelectorAll('[role=option]')].map(one => one.textContent)"


def test_overview_and_episodes_are_parts_that_are_clicked(run: Path, browser: Browser, tmp_path: Path) -> None:
    browser.open(write_report(run))
    browser.until("document.querySelector('#chart-curve path.line.success')?.getBoundingClientRect().width > 100")
    shown = browser.ask("[...document.querySelectorAll('#training figure')].map(one => one.id.slice(6))")
    assert shown == ["clip_fraction", "grad_norm", "entropy", "logp_diff_max", "seconds"]
    for element, words in ((".eval:last-of-type", "step 40"), (".target", "step 1: training")):
        assert browser.ask(f"document.querySelector('#chart-curve {element} title').textContent").startswith(words)
    assert browser.shot(tmp_path / "shot.png").startswith(PNG)
    browser.click("#to-episodes")
    browser.until(FILLED)
    assert browser.ask("document.getElementById('overview').checkVisibility()") is False
    assert len(browser.ask(OPTIONS)) == 4


def drawn(browser: Browser, **chart: Any) -> str:
    """Draw a chart of one line, and return its SVG."""
    line = {"style": "diagnostic", "name": "<b>", "band": [], "titles": [], "labels": False, **chart}
    return browser.ask(
        f"chart({json.dumps({'id': 'x', 'title': 'x', 'lines': [line]})}).querySelector('svg').outerHTML"
    )


def test_charts_are_drawn_to_scale(run: Path, browser: Browser) -> None:
    browser.open(write_report(run))
    browser.until("document.body?.className === 'overview'")
    assert re.findall(r' d="([^"]+)"', drawn(browser, points=[[0, 0], [5, 0.5], [10, 1]])) == [
        "M44.0 154.0L186.0 82.0L328.0 10.0"
    ]
    both = drawn(browser, points=[[0, 0], [10, 1]], band=[[0, 0, 1], [10, 1, 1]])
    assert ' d="M44.0 10.0L328.0 10.0L328.0 10.0L44.0 154.0Z"' in both
    for value in (0.0, 5.0, -3.0, 1e-12, 1e199):
        alone = drawn(browser, points=[[7, value]])
        assert alone.count('class="dot diagnostic"') == 1 and "NaN" not in alone and "Infinity" not in alone
        assert "<title>step 7: &lt;b&gt; " in alone, "a name is text"
    noise = random.Random(0)
    assert drawn(browser, points=[[step, noise.random()] for step in range(5000)]).count('class="target"') <= 240
    ranges = [sorted(noise.uniform(-1, 1) * 10 ** noise.uniform(-9, 9) for _ in range(2)) for _ in range(200)]
    ticks = browser.ask(f"{json.dumps(ranges)}.map(([low, high]) => ticks(low, high, 5))")
    axes = browser.ask(f"{json.dumps(ranges)}.map((values) => valueRange(values, 4))")
    for (low, high), marks, (least, most) in zip(ranges, ticks, axes, strict=True):
        slack = 1e-6 * (high - low)
        assert 1 <= len(marks) <= 15 and all(low - slack <= mark <= high + slack for mark in marks)
        if len(marks) > 1:
            apart = marks[1] - marks[0]
            mantissa = apart / 10 ** math.floor(math.log10(apart) + 1e-6)
            assert min(abs(mantissa - good) for good in (1, 2, 5, 10)) < 1e-3, "round"
        assert least - slack <= min(low, 0) and max(high, 0) <= most + slack, "it holds zero and every value"


def test_list_is_filtered_searched_and_walked_by_keys(run: Path, browser: Browser) -> None:
    write_view([run], run / "v.html", every=True)
    browser.show(run / "v.html")
    browser.select("outcome", "won", "2 of 5")
    browser.select("outcome", "")
    browser.ask("document.querySelector('[name=errors]').click()")
    browser.counts("1 of 5")
    assert "1 tool error" in browser.ask(OPTIONS)[0]
    browser.ask("document.querySelector('[name=errors]').click()")
    browser.press("/", *"syntaxerror")
    browser.counts("1 of 5")
    browser.select("text", "", "5 of 5")
    browser.press("Escape")
    browser.ask("document.getElementById('list').focus()")
    browser.press("End", "k")
    browser.until("document.querySelector('[aria-selected=true]').getAttribute('aria-posinset') === '4'")
    browser.until("document.querySelector('#columns header p').textContent.includes('seed 4')")
    browser.press("Enter")
    assert browser.ask("document.activeElement.localName") == "h2"


def test_tokens_show_each_number_and_are_walked_by_keys(browser: Browser, play: Play, view: View) -> None:
    episode = play(SYSTEM, CALL, "442788679\n", ANSWER, reward=1.0)
    view(episode)
    conversation = browser.ask("document.querySelector('#columns .segment.policy .tokens').textContent")
    assert conversation == CALL and browser.ask(f"{TOKENS}.length") == 0
    modes = browser.ask("[...document.querySelectorAll('[name=mode] option')].map(one => one.value)")
    for mode in modes[1:]:
        browser.select("mode", mode)
        assert browser.ask(f"{TOKENS}.length") == episode.n_sampled, mode
    browser.select("mode", "cumulative")
    clipped = browser.ask(f"{TOKENS}.map(one => one.classList.contains('clipped'))")
    assert clipped == [bool(t % 2) for t in range(episode.n_sampled)]
    browser.select("mode", "advantage")
    assert browser.ask(f"{TOKENS}.every(one => /even( up| down)?$/.test(one.className))")
    browser.press("ArrowRight")
    assert browser.ask("document.querySelectorAll('.policy bdi.chosen').length") == 1, "keys alone reach a token"
    browser.click("#columns .policy bdi")
    assert browser.ask("notice.textContent").startswith("sampled, probability ")
    assert " · ratio 1.01 · cumulative ratio 1.01 · " in browser.ask("notice.textContent")
    browser.press("ArrowRight")
    words = browser.ask("notice.textContent")
    assert "cumulative ratio 1.02" in words and "w_t 0.5 · b_t 0.5" in words and words.endswith("clipped")


def test_rows_stand_under_headings_and_tokens_keep_their_numbers(browser: Browser, tmp_path: Path) -> None:
    episode = forest(random.Random(1), Segment("prompt", (5, 6)), 7)
    write_episodes(tmp_path / "e.jsonl", [episode], Numerals(), ORIGIN, [list(range(episode.n_sampled))])
    write_view([tmp_path / "e.jsonl"], tmp_path / "v.html")
    browser.show(tmp_path / "v.html", height=4000)
    browser.select("mode", "logp")
    turns = sorted((part for part in episode.segments if part.trained), key=lambda part: part.turn or 0)
    begins = [0, *accumulate(len(part.token_ids) for part in turns)]
    expected = [[turns.index(part), str(token), begins[turns.index(part)] + at]
                for part in episode.segments if part.trained for at, token in enumerate(part.token_ids)]  # fmt: skip
    number = "columns[0].numbers.advantage[token.sampled]"
    held = f"[token.closest('.chunk').chunk.segment.turn, token.textContent.trim(), {number}]"
    assert browser.ask(f"{TOKENS}.map((token) => {held})") == expected
    titles = browser.ask("columns[0].turns.map((section) => section.querySelector('h3').firstChild.textContent)")
    assert titles == [f"policy · turn {number}" for number in range(1, len(turns) + 1)]
    paid = browser.ask("columns[0].turns.map((section) => section.querySelectorAll('h3 span')[1].textContent)")
    assert paid == [f"reward {reward:g}" for reward in episode.rewards]
    begun = [f", continues row {row.parent + 1} after {row.fork} token{'s'[: row.fork > 1]}" if row.parent is not None
             else ", begins anew" for row in episode.rows]  # fmt: skip
    headings = browser.ask("[...document.querySelectorAll('h3.row')].map(one => one.textContent)")
    assert headings == [f"Row {number}{how}" for number, how in enumerate(["", *begun[1:]], start=1)]
    contexts = "[...document.querySelectorAll('.context')]"
    browser.ask(f"{contexts}.forEach((one) => {{ one.open = true; }})")
    texts = f"{contexts}.map((one) => one.querySelector('.tokens').textContent)"
    browser.until(f"{texts}.every(Boolean)")
    whole = zip(episode.rows, complete_rows(episode.rows), strict=True)
    inherited = [Numerals().decode(list(ids[: row.fork])) for row, ids in whole if row.fork]
    assert browser.ask(texts) == inherited and max(map(len, begun)) > 20 and ", begins anew" in begun[1:]


def test_group_stands_side_by_side_with_its_baseline(run: Path, browser: Browser) -> None:
    browser.show(write_report(run))
    browser.press("g")
    browser.until("document.querySelectorAll('#columns .episode').length === 2")
    assert browser.ask("document.querySelectorAll('#baseline path.line').length") == 2
    assert browser.ask("document.querySelectorAll('#baseline .eval').length") == 2
    browser.press("o")
    browser.until("document.querySelectorAll('#columns .episode').length === 1")
    assert browser.ask("document.getElementById('baseline').hidden")


def test_what_tools_were_asked_attempts_and_tags_are_shown_and_found(browser: Browser, play: Play, view: View) -> None:
    asked = (ToolRun(name="python", ok=False, wall_s=0.002, arguments={"code": "a\n  b", "most": 5}),)
    episodes = [play("q", CALL, "?", GUESS, reward=0.0, attempt=at, tags=(f"level:{at}",), tool_runs=asked, seed=at)
                for at in range(9)]  # fmt: skip
    view(*episodes, width=390, height=800)
    browser.select("text", "LEVEL:7", "1 of 9")
    assert "attempt 7 · 2 turns · 1 tool error · level:7" in browser.ask(OPTIONS)[0]
    browser.until("document.querySelector('#columns header p').textContent.includes('attempt 7, seed 7')")
    browser.click("#columns summary")
    asked_for = "[...document.querySelectorAll('#columns .calls pre')].map(one => one.innerText)"
    assert browser.ask(asked_for) == ["a\n  b", "5"]
    assert browser.ask("document.body.scrollWidth") <= 390, "nothing sticks out of a narrow screen"
    browser.select("text", "", "9 of 9")
    browser.press("g")
    browser.until("document.querySelectorAll('#columns .episode').length === 9")
    offset = "document.querySelectorAll('#columns .episode')[7].getBoundingClientRect().x"
    assert 0 <= browser.ask(offset) < 390, "of a group the chosen one is on the screen"


def test_two_sources_show_flips_first(browser: Browser, tmp_path: Path, play: Play, save: Save, view: View) -> None:
    def file(name: str, *rewards: float) -> Path:
        many = (play(SYSTEM, GUESS, reward=reward, task=f"t{at}") for at, reward in enumerate(rewards))
        return save(tmp_path / name, 1, *many)

    view(file("a", 1, 0, 1, 0), file("b", 1, 0, 0, 1))
    assert [re.findall(r"t\d", option)[0] for option in browser.ask(OPTIONS)] == ["t2", "t3", "t0", "t1"]
    outcomes = browser.ask("[...document.querySelectorAll('#columns .outcome')].map(o => o.className.slice(8))")
    assert outcomes == ["good", "bad"]
    browser.ask("location.hash = '#episode-5', 1")
    browser.until("document.querySelector('#columns h2').textContent === 't1'")
    browser.select("outcome", "flip")
    browser.until("document.getElementById('count').textContent.startsWith('2 of ')")


def test_hostile_text_is_text_in_the_browser(browser: Browser, play: Play, view: View) -> None:
    asked = ToolRun(name=HOSTILE, ok=True, wall_s=0.1, arguments={HOSTILE: HOSTILE})
    options = {"tool_runs": (asked,), "parts": {HOSTILE[:60]: 1.0}, "tags": (HOSTILE,)}
    view(play(HOSTILE, HOSTILE, HOSTILE, HOSTILE, reward=1.0, task=HOSTILE, **options))
    for mode in ("text", "source"):
        browser.select("mode", mode)
        text = browser.ask("document.querySelector('#episodes').innerText")
        assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in text
        assert not [char for char in text if not char.isprintable() and char not in "\n\t"]
        for sign in ("U+202E", "U+200B", "U+0000", "U+001B"):
            assert sign in text
    assert browser.ask("document.querySelectorAll('img, #episodes script').length") == 0
    assert browser.ask("[...document.querySelectorAll('#columns bdi')].length") > 4


def test_policy_blocks_a_script_that_is_not_the_page_s_own(run: Path, browser: Browser) -> None:
    page = write_report(run)
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<h1>", "<script>document.title = 'taken'</script><h1>"), encoding="utf-8")
    browser.open(page)
    browser.until("document.body?.className === 'overview'")
    assert "arith-otb" in browser.ask("document.title")
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
    browser.complaints.clear()


def test_of_a_long_episode_elements_are_held_near_the_screen_alone(browser: Browser, play: Play, view: View) -> None:
    turns = [text for turn in range(60) for text in (f"say {turn} " + "and so on\n" * 150, f"tool {turn}\n")]
    view(play("prompt", *turns[:-1], reward=1.0), width=1000, height=700)
    browser.select("mode", "logp")
    assert 0 < browser.ask(f"{TOKENS}.length") < 9000
    browser.select("turn", "40")
    browser.until(f"{TOKENS}.some(one => one.textContent.trim() === '39')")
    browser.until(f"{TOKENS}.length < 9000")
    assert browser.ask("document.querySelectorAll('#columns .segment.policy').length") == 60


def test_what_is_printed_is_whole(browser: Browser, play: Play, view: View) -> None:
    view(play("begin", "so " * 3000 + "END", reward=1.0))
    assert "END" not in browser.ask("document.querySelector('#columns').textContent")
    browser.ask("window.dispatchEvent(new Event('beforeprint')), 1")
    assert "END" in browser.ask("document.querySelector('#columns').textContent")
    pdf = base64.b64decode(browser.call("Page.printToPDF")["data"])
    assert len(re.findall(rb"/Type /Page\b", pdf)) > 1


def test_every_control_has_a_name_and_dark_is_dark(run: Path, browser: Browser) -> None:
    browser.show(write_report(run), dark=True)
    browser.call("Accessibility.enable")
    nodes = [part for part in browser.call("Accessibility.getFullAXTree")["nodes"] if not part["ignored"]]
    controls = {"button", "searchbox", "textbox", "combobox", "spinbutton", "checkbox", "radio", "listbox", "option"}
    named = [(part["role"]["value"], part["name"]["value"]) for part in nodes
             if part["role"]["value"] in controls]  # fmt: skip
    browser.call("Accessibility.disable")
    assert {role for role, _ in named} >= {"button", "searchbox", "combobox", "spinbutton", "checkbox", "listbox"}
    assert all(name for _, name in named), named
    assert ("option", "train-2/17, failed, step 1 · 1 turn") in named
    levels = [part["value"]["value"] for node in nodes if node["role"]["value"] == "heading"
              for part in node["properties"] if part["name"] == "level"]  # fmt: skip
    assert levels[:3] == [1, 2, 3] and max(levels) == 3, "no level is left out"
    # What changes is told, and a region that tells is there before it does.
    assert sum(node["role"]["value"] == "status" for node in nodes) == 4
    announcement = browser.ask("document.getElementById('place').textContent")
    assert announcement == "Episode 1 of 4: Episode of task train-2/17, failed"
    red, green, blue = map(int, re.findall(r"\d+", browser.ask("getComputedStyle(document.body).backgroundColor"))[:3])
    assert max(red, green, blue) < 60


def test_an_episode_without_a_turn_can_be_opened(browser: Browser, play: Play, view: View) -> None:
    prompt, _ = play("q", "a", reward=1.0).segments
    view(Trajectory(task_id="t", seed=0, segments=(prompt,), rewards=(), stop=Stop.TOKEN_LIMIT))
    assert "token_limit" in browser.ask("document.querySelector('#columns').innerText")
