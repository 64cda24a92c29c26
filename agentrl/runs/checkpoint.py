"""Checkpoints: written to a temporary folder, synced, then renamed, so that a kill leaves only complete ones.

A run resumes from weights, optimizer and step number alone, since all seeds derive from the run's seed and the step.
``SHA256SUMS``, written last, detects any change to a saved checkpoint; ``sha256sum -c`` reads it too.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.errors import RunFolderError, UsageError
from agentrl.models.load import cast_copy, load_model, quiet
from agentrl.models.lora import base_of, save_model
from agentrl.render.loading import load_tokenizer
from agentrl.runs.files import is_file, open_file, read, replace, sync
from agentrl.runs.folder import RunFolder, check_begun, checkpoints, is_run, numbered
from agentrl.runs.records import read_episodes, write_episodes
from agentrl.types import Origin, Trajectory

_STATE = "trainer.json"
_OPTIMIZER = "optimizer"
_SUMS = "SHA256SUMS"
_UNUSED = "unused.jsonl.zst"
_CONVERTED = {"models/smollm2-135m": "scripts/get_smollm2.sh"}
"""Models that presets name, and the script of the repository that makes each."""


def save_checkpoint(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    weights: Callable[[Path], None] | None = None,
    optimizer: Callable[[Path], None] | None = None,
    state: dict[str, object],
    unused: Sequence[Trajectory] = (),
    origins: Mapping[str, Origin] = MappingProxyType({}),
) -> None:
    """Write a checkpoint that ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` load.

    Of a model with adapters it holds these alone, as ``peft.PeftModel.from_pretrained`` loads them.

    Args:
        path: the checkpoint's folder; one that exists already is left unchanged.
        model: saved as safetensors, unless there is ``weights``.
        tokenizer: saved with its chat template.
        weights: writes the model into a folder in its place, where it holds no weights itself.
        optimizer: writes its state, for resuming, into a folder.
        state: plain data: ``step`` and ``updates`` at least.
        unused: episodes that were played and not trained on yet.
        origins: of the environments of these.
    """
    # A run that is stopped right after a save saves the same step again.
    if path.exists():
        return
    # A rename is atomic only within a file system, so the temporary folder lies beside the final one. A kill may have
    # left an old one.
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        (weights or partial(save_model, model))(temporary)
        tokenizer.save_pretrained(temporary)
        if optimizer is not None:
            (temporary / _OPTIMIZER).mkdir()
            optimizer(temporary / _OPTIMIZER)
        if unused:
            write_episodes(temporary / _UNUSED, unused, tokenizer, origins)
        replace(temporary / _STATE, json.dumps(state).encode())
        sums = "".join(f"{_sha256(temporary / name)}  {name}\n" for name in sorted(_files(temporary)))
        replace(temporary / _SUMS, sums.encode())
        # The contents must be on disk before the new name: otherwise a power failure could leave a name without them.
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise
    sync(path.parent)  # the rename itself is a change to this folder


def damage(path: Path, above: frozenset[Path] = frozenset()) -> str:
    """Describe the damage to a checkpoint, in words that follow its name; empty where it is as it was saved.

    Args:
        path: the checkpoint's folder.
        above: checkpoints whose adapters belong to it.
    """
    above |= {path.resolve()}
    try:
        lines = read(path / _SUMS).decode().splitlines() if (path / _SUMS).exists() else []
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        # The union: a file that is missing counts as damage, and so does one that was added.
        files = _files(path)
        for name in sorted(sums.keys() | files) if sums else ():
            # Only listed files are read: any other name may lead to a device, which never ends.
            if name not in files:
                return f"lacks the file {name}"
            if sums.get(name) != _sha256(path / name):
                return f"holds another {name} than it was saved with"
        base = base_of(path)
        if base is not None and Path(base).resolve() in above:
            return f"has adapters that belong to {base}, which has its own from there"
        if base is not None and (Path(base) / _SUMS).exists() and (fault := damage(Path(base), above)):
            return f"has the adapters of {base}, which {fault}"
        state = load_state(path)
    except (OSError, ValueError, UsageError) as error:
        return f"can't be read ({error})"
    if not sums:
        return f"has no {_SUMS}"
    right = f"step-{state['step']:06d}"  # else it is of another run, or was renamed
    return f"is of {right}" if path.name.startswith("step-") and path.name != right else ""


def newest(run: Path, say: Callable[[str], None]) -> tuple[Path | None, list[Path]]:
    """Find a run's newest intact checkpoint, and the damaged ones after it.

    Args:
        run: the run's folder.
        say: prints a warning that names the skipped checkpoints.

    Raises:
        RunFolderError: the run has checkpoints, and all of them are damaged.
    """
    broken: dict[Path, str] = {}
    for path in reversed(numbered(run)):
        if not (fault := damage(path)):
            if broken:
                say(
                    f"warning: {', '.join(broken.values())}: {path.name} is taken instead, the last complete checkpoint"
                )
            return path, list(broken)
        broken[path] = f"{path.name} {fault}"
    if checkpoints(run):
        raise RunFolderError(f"no checkpoint of {str(run)!r} is intact: {', '.join(broken.values())}: put a copy back")
    return None, list(broken)


def model_at(path: str, say: Callable[[str], None]) -> str:
    """Locate the model of ``path``: a run's last intact checkpoint, or else ``path`` itself.

    Raises:
        RunFolderError: the run has no checkpoint yet, or only damaged ones; or the checkpoint is damaged.
        UsageError: a preset's model was not made yet.
    """
    folder = Path(path)
    if path in _CONVERTED and not folder.exists():
        raise UsageError(f"there is no folder {path!r} here: {_CONVERTED[path]} of the repository makes it")
    if path and is_run(folder):
        check_begun(folder)
        return str(newest(folder, say)[0])
    is_checkpoint = path and ((folder / _STATE).exists() or folder in checkpoints(folder.parent.parent))
    if is_checkpoint and (fault := damage(folder)):
        raise RunFolderError(f"the checkpoint {path!r} {fault}: name another one, or put an intact copy back")
    return path


def load_state(path: Path) -> dict[str, Any]:
    """Read the plain data of a checkpoint.

    Raises:
        RunFolderError: ``path`` is no checkpoint of a run.
    """
    try:
        state: dict[str, Any] = json.loads(read(path / _STATE))
        return {**state, "step": int(state["step"]), "updates": int(state["updates"])}
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise RunFolderError(f"{str(path)!r} is no checkpoint of a run: {_STATE}: {error!r}") from error


def load_optimizer(path: Path, load: Callable[[Path], None]) -> None:
    """Load the optimizer's state of a checkpoint; ``load`` gets the folder that holds it.

    Raises:
        RunFolderError: the state is missing, or ``load`` refused it: without it the run would train differently.
    """
    try:
        load(path / _OPTIMIZER)
    except RunFolderError:
        raise
    except Exception as error:  # safetensors raises all kinds of exceptions on a file of another format
        raise RunFolderError(
            f"{path / _OPTIMIZER} can't be read ({type(error).__name__}): put an intact copy back, or move {path.name} "
            "away to resume from the checkpoint before it"
        ) from error


def load_unused(path: Path) -> list[Trajectory]:
    """Read the episodes that a checkpoint holds for later steps.

    Raises:
        TrajectoryError: the file holds anything else.
    """
    file = path / _UNUSED
    return [record.trajectory for record in read_episodes(file)] if file.exists() else []


def prune(run: Path, keep: int) -> None:
    """Delete the older checkpoints of a run, and what a kill has left of unfinished ones.

    The checkpoint of step 0 stays, since adapters and the KL reference may refer to it.

    Args:
        run: the run's folder.
        keep: how many of the newest to keep; 0 keeps all.
    """
    for path in checkpoints(run)[1:-keep] if keep else ():
        # Renamed first: a kill must not leave half of a checkpoint under its name.
        path.rename(path.with_name(f".{path.name}.tmp"))
    for gone in (run / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(gone)


def reference_at(run: RunFolder) -> Path:
    """Locate the reference model of the KL penalty: the model that reinforcement learning began with.

    Raises:
        RunFolderError: the checkpoint that holds it is missing or damaged.
    """
    path = run.checkpoint(0)
    if fault := damage(path):
        raise RunFolderError(f"{path} {fault}, and is the reference of algo.kl_coef: put an intact copy back")
    return path


def export(path: str, out: Path, dtype: str, say: Callable[[str], None]) -> None:
    """Write the model of ``path``, with adapters merged, and its tokenizer in Hugging Face's format.

    Args:
        path: a run, a checkpoint of one, or a folder of adapters or of a model.
        out: a folder that does not exist yet.
        dtype: of the written weights, such as ``"bfloat16"``.
        say: prints a warning that names skipped checkpoints.

    Raises:
        UsageError: there is no such model, it is damaged, or ``out`` exists or can't be written.
    """
    quiet()
    weights = model_at(path, say)
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"the folder {str(out)!r} can't be made ({error.strerror}): name another one") from error
    try:
        tokenizer = load_tokenizer(weights, "name a run, or a folder that holds a model")
        cast_copy(load_model(weights), getattr(torch, dtype)).save_pretrained(out)
        tokenizer.save_pretrained(out)
    except BaseException:
        shutil.rmtree(out)
        raise


def _files(path: Path) -> set[str]:
    """List the files of a checkpoint, without its checksums and hidden files."""
    # File browsers and network file systems add hidden files of their own.
    files = (file for file in path.rglob("*") if is_file(file) and not file.name.startswith("."))
    return {str(file.relative_to(path)) for file in files} - {_SUMS}


def _sha256(path: Path) -> str:
    with open_file(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
