"""A tokenizer that passes everything on: tests change one of its answers."""

from typing import Any


class Wrapped:
    """Passes everything on to another tokenizer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, text: str, **options: Any) -> Any:
        return self.inner(text, **options)
