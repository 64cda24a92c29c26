"""The charts of a page, as data."""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any


def charts_of(page: Path) -> dict[str, list[dict[str, Any]]]:
    """Unpack the lists of charts that a page holds."""
    (packed,) = re.findall(r'<script type="text/plain" id="charts">([^<]*)</script>', page.read_text(encoding="utf-8"))
    return json.loads(zlib.decompress(base64.b64decode(packed)))
