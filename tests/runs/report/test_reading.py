"""Reading episodes in a real browser: seeds, answers, legends, hits of a search, links, and what a group differs in."""

import pytest

from .browser import FILLED, Browser
from .conftest import Play, View
from .test_browser import OPTIONS

pytestmark = pytest.mark.slow
LONG = "\n".join(f"rule {number}: nothing" for number in range(120))
ON_SCREEN = "(one => { const {top, bottom} = one.getBoundingClientRect(); return top < innerHeight && bottom > 0; })"
NOW = "document.querySelector('#columns .hit.now')"
HITS = "[...document.querySelectorAll('#columns .hit')]"


def test_seeds_and_answers_are_fields_as_they_are(browser: Browser, play: Play, view: View) -> None:
    seed = 8862432589125462517
    answered = {"expected": "x = 1\ny = 2", "answer": "\u202e3"}
    episodes = [play("q", "a", reward=0.0, seed=seed, **answered), play("q", "a", reward=0.0, task="t2", answer="")]
    view(*episodes)
    assert f"seed {seed}" in browser.ask("document.querySelector('#columns header p').textContent")
    fields = "[...document.querySelectorAll('#columns .answer')].map(one => one.innerText)"
    assert browser.ask(fields) == ["Expected answer\nx = 1\ny = 2", "Given answer\nU+202E3"]
    browser.press("j")
    browser.until("document.querySelector('#columns h2').textContent === 't2'")
    assert browser.ask(fields) == ["Given answer\nnone"]


@pytest.mark.parametrize("dark", [False, True])
def test_legends_say_what_more_colour_means(browser: Browser, play: Play, view: View, dark: bool) -> None:
    view(play("q", "a b c", reward=1.0), dark=dark)
    for mode in ("logp", "entropy"):
        browser.select("mode", mode)
        legend = browser.ask("document.getElementById('legend').textContent")
        assert "the stronger the colour" in legend and "dark" not in legend


def test_search_jumps_from_hit_to_hit(browser: Browser, play: Play, view: View) -> None:
    many = play("prompt", f"{LONG}\nA (needle)\n{LONG}", "no", f"{LONG} one (NEEDLE) more", reward=1.0, task="t0")
    others = [play("p", text, reward=1.0, task=f"t{at}") for at, text in enumerate(["none", "the (needle)"], start=1)]
    view(many, *others)
    browser.press("/", *"(needle)")
    browser.counts("2 of 3")
    browser.until(f"{NOW}?.textContent === '(needle)' && {ON_SCREEN}({NOW})")
    browser.until("notice.textContent === 'hit 1 of 2 in this episode'")
    browser.press("Enter")
    browser.until("notice.textContent === 'hit 2 of 2 in this episode'")
    browser.ask("document.activeElement.blur()")
    browser.press("N")
    browser.until("notice.textContent === 'hit 1 of 2 in this episode'")
    browser.press("n")
    browser.until(f"{NOW}?.textContent === '(NEEDLE)' && {ON_SCREEN}({NOW})")
    browser.press("n")
    browser.until("document.querySelector('#columns h2').textContent === 't2'")
    browser.until(f"{NOW}?.textContent === '(needle)'")
    browser.press("N")
    browser.until(f"{NOW}?.textContent === '(NEEDLE)'")
    browser.select("mode", "logp")
    assert browser.ask(f"{HITS}.map(one => one.textContent).join('').toLowerCase()") == "(needle)"
    browser.select("text", "", "3 of 3")
    browser.until(f"{HITS}.length === 0")
    browser.press("n")
    assert browser.ask("document.querySelector('#columns h2').textContent") == "t0"


def test_link_opens_the_page_at_its_episode(browser: Browser, play: Play, view: View) -> None:
    episodes = [play("p", f"said {at}", reward=float(at % 2), task=f"t{at}") for at in range(40)]
    view(*episodes)
    browser.select("outcome", "lost", "20 of 40")
    browser.press("j")
    browser.until("document.querySelector('#columns h2').textContent === 't2'")
    assert browser.ask("document.querySelector('#columns header a').hash") == "#episode-2"
    browser.ask("location.hash = '#episode-33', 1")
    browser.until("document.querySelector('#columns h2').textContent === 't33'")
    browser.counts("40 of 40")
    assert browser.ask(OPTIONS)
    link = browser.ask("document.querySelector('#columns header a').href")
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=link)
    browser.until("document.querySelector('#columns h2')?.textContent === 't33'")
    assert browser.ask(f"{ON_SCREEN}(document.querySelector('[aria-selected=true]'))")


@pytest.mark.parametrize("size", [(1280, 900), (390, 800)])
def test_differences_are_above_the_fold(browser: Browser, play: Play, view: View, size: tuple[int, int]) -> None:
    facts = {"expected": "42", "answer": "41", "tags": ("level:1",)}
    episodes = [
        play(LONG, "print(1)", LONG, f"I say {at}", reward=0.0, seed=at, attempt=at, **facts) for at in range(3)
    ]
    view(*episodes, width=size[0], height=size[1])
    browser.press("g")
    browser.until("document.querySelectorAll('#columns .episode').length === 3")
    browser.ask("document.querySelector('#columns').scrollIntoView(), 1")
    turns = "[...document.querySelectorAll('#columns .episode > .segment.policy .chunk')]"
    browser.until(f"{turns}.length === 3 && {turns}.every(one => one.textContent.startsWith('I say '))")
    assert browser.ask(f"{turns}.every({ON_SCREEN})")
    summaries = browser.ask("[...document.querySelectorAll('#columns .shared summary')].map(one => one.textContent)")
    assert len(summaries) == 3 and all(summary.endswith("tokens, the same in all 3") for summary in summaries)
    browser.select("turn", "1")
    browser.until("[...document.querySelectorAll('#columns .shared')].every(one => one.open)")
    browser.select("text", "print(1)", "3 of 3")
    browser.until(f"{NOW}?.textContent === 'print(1)'")
    browser.press("o")
    browser.until(f"document.querySelectorAll('#columns .shared').length === 0 && {FILLED}")
