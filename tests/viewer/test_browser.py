import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.viewer import write_report

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--virtual-time-budget=3000",
)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def browse(tmp_path: Path, require: Callable[[bool, str], None]) -> Callable[..., str]:
    """Open a page from disk in a real browser; gives what the browser printed."""
    require(CHROMIUM is not None, "needs chromium")
    assert CHROMIUM is not None

    def go(page: Path, *flags: str) -> str:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
        done = subprocess.run(command, capture_output=True, check=True)
        return done.stdout.decode("utf-8") + done.stderr.decode("utf-8", errors="replace")

    return go


@pytest.mark.slow
def test_browser_shows_the_curve_and_three_episodes(run: Path, browse: Callable[..., str]) -> None:
    page = write_report(run)
    dom = browse(page, "--dump-dom")
    assert len(re.findall(r'<article class="episode"', dom)) == 3
    assert re.search(r'<figure class="chart" id="chart-curve">.*?<path class="line success" d="M', dom, re.DOTALL)
    # The browser closes what a broken page leaves open, in other places: every segment must still be in an article.
    assert dom.count('class="segment policy"') == page.read_text(encoding="utf-8").count('class="segment policy"')


@pytest.mark.slow
def test_browser_runs_the_page_s_script_and_style_under_its_own_policy(run: Path, browse: Callable[..., str]) -> None:
    page = write_report(run)
    text = page.read_text(encoding="utf-8")
    probe = 'document.querySelector("bdi[title]").click();'
    probe += "document.title = told.textContent + getComputedStyle(told).position;"
    told = browse(page, "--dump-dom", "--enable-logging=stderr", "--v=0")
    assert "Content Security Policy" not in told
    # The same page with one more statement, and a policy that allows it.
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert script is not None
    changed = re.sub(r"script-src '[^']+'", "script-src 'unsafe-inline'", text)
    changed = changed.replace(script[1], script[1] + probe)
    other = run / "probe.html"
    other.write_text(changed, encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", browse(other, "--dump-dom"))
    assert title is not None and title[1] == "prompt, token 0fixed"


@pytest.mark.slow
def test_browser_blocks_a_script_that_is_not_the_page_s_own(run: Path, browse: Callable[..., str]) -> None:
    page = write_report(run)
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<main>", "<main><script>document.title = 'taken'</script>"), encoding="utf-8")
    assert "<title>arith-otb" in browse(page, "--dump-dom")


@pytest.mark.slow
def test_browser_paints_the_page(run: Path, browse: Callable[..., str], tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    browse(write_report(run), f"--screenshot={shot}", "--window-size=1280,2400")
    assert shot.read_bytes().startswith(PNG) and shot.stat().st_size > 50_000
