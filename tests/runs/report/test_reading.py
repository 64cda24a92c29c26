"""Reading episodes in a real browser: seeds, answers, legends, hits of a search, links, and what a group differs in."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.runs.report import write_view
from agentrl.types import Trajectory

from .browser import Browser
from .test_browser import FILLED, OPTIONS, select, show

pytestmark = pytest.mark.slow
Play = Callable[..., Trajectory]
Save = Callable[..., Path]
LONG = "\n".join(f"rule {number}: nothing" for number in range(120))
ON_SCREEN = "(one => { const {top, bottom} = one.getBoundingClientRect(); return top < innerHeight && bottom > 0; })"
NOW = "document.querySelector('#columns .hit.now')"
HITS = "[...document.querySelectorAll('#columns .hit')]"


def search(browser: Browser, words: str, count: str) -> None:
    select(browser, "#filters", "text", words)
    browser.until(f"document.getElementById('count').textContent === '{count}'")


def test_seeds_and_answers_are_fields_as_they_are(tmp_path: Path, browser: Browser, play: Play, save: Save) -> None:
    seed = 8862432589125462517
    answered = {"expected": "x = 1\ny = 2", "answer": "\u202e3"}
    episodes = [play("q", "a", reward=0.0, seed=seed, **answered), play("q", "a", reward=0.0, task="t2", answer="")]
    write_view([save(tmp_path, 1, *episodes)], tmp_path / "v.html")
    show(browser, tmp_path / "v.html")
    assert f"seed {seed}" in browser.ask("document.querySelector('#columns header p').textContent")
    fields = "[...document.querySelectorAll('#columns .answer')].map(one => one.innerText)"
    assert browser.ask(fields) == ["Expected answer\nx = 1\ny = 2", "Given answer\nU+202E3"]
    browser.press("j")
    browser.until("document.querySelector('#columns h2').textContent === 't2'")
    assert browser.ask(fields) == ["Given answer\nnone"]


@pytest.mark.parametrize("dark", [False, True])
def test_legends_say_what_more_colour_means_in_either_theme(
    tmp_path: Path, browser: Browser, play: Play, save: Save, dark: bool
) -> None:
    write_view([save(tmp_path, 1, play("q", "a b c", reward=1.0))], tmp_path / "v.html")
    show(browser, tmp_path / "v.html", dark=dark)
    for mode in ("logp", "entropy"):
        select(browser, "#tools", "mode", mode)
        legend = browser.ask("document.getElementById('legend').textContent")
        assert "the stronger the colour" in legend and "dark" not in legend


def test_search_jumps_from_hit_to_hit(tmp_path: Path, browser: Browser, play: Play, save: Save) -> None:
    many = play("prompt", f"{LONG}\nA (needle)\n{LONG}", "no", f"{LONG} one (NEEDLE) more", reward=1.0, task="t0")
    others = [play("p", text, reward=1.0, task=f"t{at}") for at, text in enumerate(["none", "the (needle)"], start=1)]
    write_view([save(tmp_path, 1, many, *others)], tmp_path / "v.html")
    show(browser, tmp_path / "v.html")
    search(browser, "(needle)", "2 of 3 episodes")
    browser.until(f"{NOW}?.textContent === '(needle)' && {ON_SCREEN}({NOW})")
    assert browser.ask("told.textContent") == "hit 1 of 2 in this episode"
    browser.press("Escape")
    browser.ask("document.activeElement.blur()")
    browser.press("n")
    browser.until(f"{NOW}?.textContent === '(NEEDLE)' && {ON_SCREEN}({NOW})")
    browser.press("n")
    browser.until("document.querySelector('#columns h2').textContent === 't2'")
    browser.until(f"{NOW}?.textContent === '(needle)'")
    browser.press("N")
    browser.until(f"{NOW}?.textContent === '(NEEDLE)'")
    select(browser, "#tools", "mode", "logp")
    assert browser.ask(f"{HITS}.map(one => one.textContent).join('').toLowerCase()") == "(needle)"
    search(browser, "", "3 of 3 episodes")
    browser.until(f"{HITS}.length === 0")
    browser.press("n")
    assert browser.ask("document.querySelector('#columns h2').textContent") == "t0"


def test_enter_in_the_search_jumps_too(tmp_path: Path, browser: Browser, play: Play, save: Save) -> None:
    write_view([save(tmp_path, 1, play("p", "say it, and say more", reward=1.0))], tmp_path / "v.html")
    show(browser, tmp_path / "v.html")
    browser.press("/")
    for key in "say":
        browser.press(key)
    browser.until("told.textContent === 'hit 1 of 2 in this episode'")
    browser.press("Enter")
    browser.until("told.textContent === 'hit 2 of 2 in this episode'")


def test_link_opens_the_page_at_its_episode(tmp_path: Path, browser: Browser, play: Play, save: Save) -> None:
    episodes = [play("p", f"said {at}", reward=float(at % 2), task=f"t{at}") for at in range(40)]
    write_view([save(tmp_path, 1, *episodes)], tmp_path / "v.html")
    show(browser, tmp_path / "v.html")
    select(browser, "#filters", "outcome", "lost")
    browser.until("document.getElementById('count').textContent === '20 of 40 episodes'")
    browser.press("j")
    browser.until("document.querySelector('#columns h2').textContent === 't2'")
    assert browser.ask("document.querySelector('#columns header a').hash") == "#episode-2"
    browser.ask("location.hash = '#episode-33', 1")
    browser.until("document.querySelector('#columns h2').textContent === 't33'")
    assert (
        len(browser.ask(OPTIONS)) and browser.ask("document.getElementById('count').textContent") == "40 of 40 episodes"
    )
    link = browser.ask("document.querySelector('#columns header a').href")
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=link)
    browser.until("document.querySelector('#columns h2')?.textContent === 't33'")
    assert browser.ask(f"{ON_SCREEN}(document.querySelector('[aria-selected=true]'))")


def test_link_to_the_second_of_a_pair_opens_the_pair(tmp_path: Path, browser: Browser, play: Play, save: Save) -> None:
    files = [
        save(tmp_path / name, 1, play("p", name, reward=0.0), play("p", "c", reward=0.0, task="t")) for name in "ab"
    ]
    write_view(files, tmp_path / "v.html")
    show(browser, tmp_path / "v.html")
    browser.ask("location.hash = '#episode-3', 1")
    browser.until("document.querySelector('#columns h2').textContent === 't'")


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 800)])
def test_group_s_differences_are_above_the_fold(
    tmp_path: Path, browser: Browser, play: Play, save: Save, width: int, height: int
) -> None:
    told = {"expected": "42", "answer": "41", "tags": ("level:1",)}
    episodes = [play(LONG, "print(1)", LONG, f"I say {at}", reward=0.0, seed=at, attempt=at, **told) for at in range(3)]
    write_view([save(tmp_path, 1, *episodes)], tmp_path / "v.html")
    show(browser, tmp_path / "v.html", width=width, height=height)
    browser.press("g")
    browser.until("document.querySelectorAll('#columns .episode').length === 3")
    browser.ask("document.querySelector('#columns').scrollIntoView(), 1")
    turns = "[...document.querySelectorAll('#columns .episode > .segment.policy .chunk')]"
    browser.until(f"{turns}.length === 3 && {turns}.every(one => one.textContent.startsWith('I say '))")
    assert browser.ask(f"{turns}.every({ON_SCREEN})")
    summaries = browser.ask("[...document.querySelectorAll('#columns .shared summary')].map(one => one.textContent)")
    assert len(summaries) == 3 and all(one.endswith("tokens, the same in all 3") for one in summaries)
    select(browser, "#tools", "turn", "1")
    browser.until("[...document.querySelectorAll('#columns .shared')].every(one => one.open)")
    search(browser, "print(1)", "3 of 3 episodes")
    browser.until(f"{NOW}?.textContent === 'print(1)'")
    browser.press("o")
    browser.until(f"document.querySelectorAll('#columns .shared').length === 0 && {FILLED}")
