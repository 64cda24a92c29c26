"""What a page holds beside its elements, as data."""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any


def blocks(page: Path) -> dict[str, Any]:
    """Unpack every block of a page as a browser does."""
    packed = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', page.read_text(encoding="utf-8"))
    return {name: json.loads(zlib.decompress(base64.b64decode(text))) for name, text in packed}
