"""Load a tokenizer from a folder or from the Hugging Face hub, with its model's end tokens."""

import json
import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from agentrl.errors import HubError, UsageError, first_line

ENDS = "end_token_ids"
"""The tokenizer's setting that records its model's other end tokens."""
_HUB_S = 5.0
"""Seconds in which the hub has to answer at all."""


def load_tokenizer(source: str | Path, remedy: str = "give the folder of one") -> Any:
    """Load a tokenizer from a folder or by its name on the Hugging Face hub, with its model's end tokens.

    ``end_token_ids`` in its settings are the control tokens beside ``eos_token`` at which its model's
    ``generation_config.json`` ends a text. They are saved with the tokenizer, and so in each checkpoint of a run.

    Args:
        source: the folder or name.
        remedy: advice for the error message.

    Raises:
        UsageError: transformers is not installed, or there is no such tokenizer.
        HubError: it is not here, and the hub can't be reached.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise UsageError("checking tokens needs transformers: pip install 'agentrl[train]'") from error
    _check_hub(str(source))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        # These say how the tokenizer was loaded; they would be saved with its settings.
        for name in ("is_local", "local_files_only"):
            tokenizer.init_kwargs.pop(name, None)
        _record_ends(source, tokenizer)
    except Exception as error:  # transformers raises all kinds of things on files that are none of its own
        raise UsageError(f"no tokenizer can be loaded from {str(source)!r}: {remedy} ({first_line(error)})") from error
    # For a folder without a tokenizer, transformers may make one that writes no tokens.
    if not tokenizer("a", add_special_tokens=False).input_ids:
        raise UsageError(f"no tokenizer can be loaded from {str(source)!r}: {remedy} (it has no tokenizer.json)")
    return tokenizer


def _check_hub(name: str) -> None:
    """Refuse what is in no folder where the hub can't be reached: transformers would try it again and again."""
    from huggingface_hub import constants, try_to_load_from_cache

    # Whatever can be no name on the hub is refused by transformers at once.
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return
    # A model has the one file, a tokenizer alone the other.
    cached = (try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json"))
    if any(isinstance(path, str) for path in cached):
        return
    absent, remedy = f"there is no folder {name!r} here, and the hub", "correct the path, or go online once"
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{absent} is not asked, since HF_HUB_OFFLINE is set: {remedy}")
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=_HUB_S).close()
    except urllib.error.HTTPError:
        return  # it answers
    except (urllib.error.URLError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # the hub's own client may trust other certificates
            return
        raise HubError(f"{absent} at {constants.ENDPOINT} can't be reached ({reason}): {remedy}") from error


def _record_ends(source: str | Path, tokenizer: Any) -> None:
    from transformers.utils.hub import cached_file

    if ENDS in tokenizer.init_kwargs:
        return
    kinds = ("gated_repo", "missing_entries", "connection_errors")
    quietly: Any = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    # In the order of transformers, which makes a checkpoint's first file from the second where the first is missing.
    for name in ("generation_config.json", "config.json"):
        if (path := cached_file(source, name, **quietly)) is None:
            continue
        try:
            settings = json.loads(Path(path).read_text(encoding="utf-8"))
            listed = settings.get("eos_token_id", settings.get("text_config", {}).get("eos_token_id"))
            listed = [listed] if isinstance(listed, int) else listed or []
            # A default of the model's class, such as 2, may be a letter here.
            ends = [end for end in listed if end in tokenizer.added_tokens_decoder and end != tokenizer.eos_token_id]
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{name} lists no end tokens that can be read: {error}") from error
        if listed:
            tokenizer.init_kwargs |= {ENDS: ends} if ends else {}
            return
