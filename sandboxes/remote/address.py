"""Where servers of sandboxes are, and the key that opens them."""

import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from agentrl.sandboxes.base import SandboxUnavailable

PREFIX: Final = "remote:"
"""Begins the name of the back end; the servers' URLs follow, with commas between them."""
KEY, KEY_FILE = "AGENTRL_SANDBOX_KEY", "AGENTRL_SANDBOX_KEY_FILE"
"""Environment variables with the servers' key, and with the path of a file that holds it."""
_MIN_KEY: Final = 16


def servers_of(name: str) -> tuple[str, ...]:
    """Return the WebSocket URLs that a back end's name lists.

    Raises:
        ValueError: It is not ``remote:`` with one or several ``http`` or ``https`` URLs.
    """
    urls = list[str]()
    for url in name.removeprefix(PREFIX).split(","):
        parts = urlsplit(url.strip().rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is no server of sandboxes: write remote:http://HOST:PORT,http://HOST:PORT")
        if "@" in parts.netloc:
            raise ValueError(f"a sandbox server's URL is stored with the run, so put the key into {KEY}")
        urls.append(parts._replace(scheme=parts.scheme.replace("http", "ws")).geturl())
    return tuple(dict.fromkeys(urls))


def find_key(path: str = "") -> str:
    """Return the key that a file or the environment holds; empty where neither does.

    Raises:
        SandboxUnavailable: The file can't be read, or the key is shorter than 16 characters or not ASCII.
    """
    path, key = path or os.environ.get(KEY_FILE, ""), os.environ.get(KEY, "")
    if path:
        try:
            key = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise SandboxUnavailable(f"the key of the sandbox servers can't be read: {error}") from error
    if (path or key) and (len(key) < _MIN_KEY or not key.isascii() or not key.isprintable()):
        message = f"the key of the sandbox servers must have at least {_MIN_KEY} ASCII characters"
        raise SandboxUnavailable(f"{message}: make one with `openssl rand -hex 16`")
    return key


def missing() -> SandboxUnavailable:
    """Return the fault that the package websockets is not installed."""
    remedy = "pip install 'agentrl[remote]'"
    return SandboxUnavailable(f"remote sandboxes need websockets: {remedy}", remedy=remedy)
