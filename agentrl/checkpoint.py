"""Checkpoints: written beside, synced, then renamed, so that a kill at any instant leaves the last whole one.

Seeds derive from the run's seed and the step, so weights, optimizer and step number are all that a run goes on from.
``SHA256SUMS``, written last, tells a checkpoint that is as it was saved from any other; ``sha256sum -c`` reads it too.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.errors import RunFolderError
from agentrl.runfolder import checkpoints, numbered

_STATE = "trainer.json"
_OPTIMIZER = "optimizer.pt"
_SUMS = "SHA256SUMS"


def save_checkpoint(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    state: dict[str, object],
) -> None:
    """Write a checkpoint that ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` load.

    Args:
        path: the checkpoint's folder; one that is there already is left as it is.
        model: its weights, as safetensors.
        tokenizer: with its chat template.
        optimizer: its state, for going on.
        state: plain data: ``step`` and ``updates`` at least.
    """
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if optimizer is not None:
            torch.save(optimizer.state_dict(), temporary / _OPTIMIZER)
        (temporary / _STATE).write_text(json.dumps(state), encoding="utf-8")
        sums = "".join(f"{_sha256(temporary / name)}  {name}\n" for name in sorted(_files(temporary)))
        (temporary / _SUMS).write_text(sums, encoding="utf-8")
        for file in temporary.rglob("*"):
            _sync(file)
        _sync(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise
    _sync(path.parent)


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, in words that follow its name; empty where it is as it was saved.

    One that an older version saved has no checksums: of it, only the step is checked.
    """
    try:
        lines = (path / _SUMS).read_text(encoding="utf-8").splitlines() if (path / _SUMS).exists() else []
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        for name in sorted(sums.keys() | _files(path)) if sums else ():
            if sums.get(name) != _sha256(path / name):
                return f"holds another {name} than it was saved with"
        state = load_state(path)
    except (OSError, ValueError, RunFolderError) as error:
        return f"can't be read ({error})"
    if not sums and "records" in state:
        return f"has no {_SUMS}"
    right = f"step-{state['step']:06d}"  # else it is of another run, or was renamed
    return f"is of {right}" if path.name.startswith("step-") and path.name != right else ""


def newest(run: Path, say: Callable[[str], None]) -> tuple[Path | None, list[Path]]:
    """The newest checkpoint of a run that is as it was saved, and what is numbered later and is not.

    Args:
        run: the run's folder.
        say: is told of what is passed over.

    Raises:
        RunFolderError: the run has checkpoints, and none of them is whole.
    """
    broken: dict[Path, str] = {}
    for path in reversed(numbered(run)):
        if not (fault := damage(path)):
            if broken:
                say(f"warning: {', '.join(broken.values())}: {path.name} is taken instead, the last whole checkpoint")
            _tell_of_no_sums(path, say)
            return path, list(broken)
        broken[path] = f"{path.name} {fault}"
    if checkpoints(run):
        raise RunFolderError(f"no checkpoint of {str(run)!r} is whole: {', '.join(broken.values())}: put a copy back")
    return None, list(broken)


def model_at(path: str, say: Callable[[str], None]) -> str:
    """Where the model is that ``path`` names: the last whole checkpoint where it is a run, else ``path`` itself.

    Raises:
        RunFolderError: the run has no checkpoint yet, or only damaged ones; or the checkpoint is damaged.
    """
    place = Path(path)
    if path and (place / "config.toml").is_file() and not (place / "config.json").is_file():
        saved, _ = newest(place, say)
        if saved is None:
            raise RunFolderError(f"the run {path!r} has no checkpoint yet")
        return str(saved)
    if path and ((place / _STATE).exists() or place in checkpoints(place.parent.parent)):
        if fault := damage(place):
            raise RunFolderError(f"the checkpoint {path!r} {fault}: name another one, or put a whole copy back")
        _tell_of_no_sums(place, say)
    return path


def load_state(path: Path) -> dict[str, Any]:
    """The plain data of a checkpoint.

    Raises:
        RunFolderError: ``path`` is no checkpoint of a run.
    """
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
        return {**state, "step": int(state["step"]), "updates": int(state["updates"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunFolderError(f"{str(path)!r} is no checkpoint of a run: {_STATE}: {error!r}") from error


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Take over the optimizer's state of a checkpoint.

    Raises:
        RunFolderError: it is not there or can't be read: without it a run would go on as another one.
    """
    try:
        optimizer.load_state_dict(torch.load(path / _OPTIMIZER, weights_only=True, map_location="cpu"))
    except Exception as error:  # torch raises all kinds of things on a file that is none of its own
        raise RunFolderError(
            f"{path / _OPTIMIZER} can't be read ({type(error).__name__}): put a whole copy back, or move {path.name} "
            "away to go on from the checkpoint before it"
        ) from error


def _tell_of_no_sums(path: Path, say: Callable[[str], None]) -> None:
    if not (path / _SUMS).exists():
        say(f"{path.name} was saved without checksums, by an older agentrl: damage to its weights would not be seen")


def _files(path: Path) -> set[str]:
    """What a checkpoint holds, without its checksums and what a system hides there."""
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return {str(file.relative_to(path)) for file in files} - {_SUMS}


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
