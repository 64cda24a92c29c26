"""Convert a GGUF file, in which llama.cpp keeps a model, to a folder in Hugging Face's form, weights in float32.

transformers reads the file, with the package ``gguf`` for the quantized weights.
"""

import hashlib
import importlib.util
import io
import os
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import UsageError, first_line
from agentrl.models.load import quiet

_CACHE = "agentrl/gguf"


def from_gguf(path: str, say: Callable[[str], None]) -> str:
    """Return the folder to which the GGUF file at ``path`` was converted; any other path is returned as it is.

    The folder is made at the first call, below ``$XDG_CACHE_HOME`` or ``~/.cache``, and named by the file's SHA-256.

    Args:
        path: such a file, or a folder that holds one and no ``config.json``.
        say: reports what takes long.

    Raises:
        UsageError: the folder holds several such files, or the file can't be converted.
    """
    if (file := _find(path)) is None:
        return path
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    base = os.environ.get("XDG_CACHE_HOME", "")
    out = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / _CACHE / digest[:32]
    if not out.exists():
        say(f"converting {file} to {out}: once, about a minute for a small model")
        convert(file, out)
    return str(out)


def _find(path: str) -> Path | None:
    """Return the GGUF file that ``path`` names."""
    source = Path(path)
    if path.endswith(".gguf") and source.is_file():
        return source
    if not path or not source.is_dir() or (source / "config.json").exists():
        return None
    files = sorted(source.glob("*.gguf"))
    if len(files) > 1:
        raise UsageError(f"{path!r} holds {len(files)} GGUF files: name one of them, such as {str(files[0])!r}")
    return files[0] if files else None


def convert(file: Path, out: Path) -> None:
    """Write the model of a GGUF file and its tokenizer to the new folder ``out``, completely or not at all.

    Raises:
        UsageError: the package ``gguf`` is missing, transformers can't read the file, or ``out`` can't be written.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(f"{str(file)!r} can't be read without the package gguf: pip install gguf")
    quiet()
    options: dict[str, Any] = {"gguf_file": file.name}
    try:
        with redirect_stderr(io.StringIO()):  # a bar that quiet() leaves
            model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    except Exception as error:  # transformers raises all kinds of things on files that are none of its own
        raise UsageError(f"transformers can't read the model in {str(file)!r}: {first_line(error)}") from error
    # The weights are plain numbers by now, but transformers refuses to save a model that it loaded from such a file.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".") as scratch:
            made = Path(scratch) / "made"
            plain.save_pretrained(made)
            tokenizer.save_pretrained(made)
            made.rename(out)
    except OSError as error:
        if not out.exists():  # as where another process has converted it meanwhile
            raise UsageError(f"{str(out)!r} can't be written: {error.strerror}") from error
