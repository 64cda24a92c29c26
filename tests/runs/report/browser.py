"""A real Chromium, driven over its own debugging pipe: opens pages from disk, clicks, types and looks."""

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--remote-debugging-pipe",
)
PATIENCE_S = 60.0
FILLED = "[...document.querySelectorAll('#columns .chunk')].some(one => one.textContent)"


class Browser(AbstractContextManager["Browser"]):
    """One page of a browser.

    Args:
        profile: an empty folder for what the browser keeps.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        (their_in, self._in), (self._out, their_out) = os.pipe(), os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        script = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        command = ["bash", "-c", script, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=(their_in, their_out), stdout=quiet, stderr=quiet)
        os.close(their_in)
        os.close(their_out)
        self._rest, self._number = b"", 0
        self.complaints: list[str] = []
        """What the browser said of the page: exceptions, blocked scripts and the like."""
        self._session = ""
        (target, *_) = [info for info in self.call("Target.getTargets")["targetInfos"] if info["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __exit__(self, *_: object) -> None:
        self._session = ""
        self.call("Browser.close")
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **options: Any) -> Any:
        """Send a command and give its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": options}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]
            if reply.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(reply["params"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._out, 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page; its blocks may still be on their way."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        colours = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=colours)
        self.call("Page.navigate", url=page.as_uri())

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE_S
        while not self.ask(script):
            assert time.monotonic() < end, f"never true: {script}"

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        find = f"document.querySelector({json.dumps(selector)})"
        middle = "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        x, y = self.ask(f"{find}.scrollIntoView({{block: 'nearest'}}), {middle}({find}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, *keys: str) -> None:
        """Press and release keys one after another, each by its name or the character it types."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def select(self, name: str, value: str, count: str = "") -> None:
        """Choose in a field, as its own events tell it, and wait until the page counts so many episodes."""
        field = f"document.querySelector('form [name={name}]')"
        events = (f"{field}.dispatchEvent(new Event('{event}', {{bubbles: true}}))" for event in ("input", "change"))
        self.ask(f"{field}.value = {json.dumps(value)}, {', '.join(events)}, 1")
        if count:
            self.counts(count)

    def counts(self, count: str) -> None:
        """Wait until the page says how many episodes it lists."""
        self.until(f"document.getElementById('count').textContent === '{count} episodes'")

    def show(self, page: Path, **options: int) -> None:
        """Open a page at its episodes."""
        self.open(page, **options)
        self.until("document.readyState === 'complete' && !document.querySelector('nav').hidden")
        if self.ask("document.body.className") != "episodes":
            self.click("#to-episodes")
        self.until(FILLED)

    def shot(self, path: Path) -> bytes:
        """Paint the page into a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
        return path.read_bytes()
