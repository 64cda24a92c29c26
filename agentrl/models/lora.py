"""LoRA: low-rank adapters beside frozen weights (arXiv 2106.09685), made and saved by peft.

A layer with weights W and adapters A and B computes with W + (alpha/rank)·B·A. B begins as 0, so that fresh adapters
change nothing. peft is imported only for a run or a folder that has adapters.
"""

import hashlib
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import ConfigError, UsageError, nearest
from agentrl.models.linear import use_fast_linear
from agentrl.models.slices import Slices, path_of, saved_name

_CONFIG, _WEIGHTS, _BASE = "adapter_config.json", "adapter_model.safetensors", "base_fingerprint.txt"
_ADAPTER = "default"
"""peft's name for a model's only adapter."""
_PREFIX = "base_model.model."
"""What peft's own model adds before the names of parameters, and expects in files."""


def is_adapted(model: nn.Module) -> bool:
    """Return True if the model has adapters."""
    return any(".lora_" in name for name, _ in model.named_parameters())


def target_names(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Select the linear layers that get adapters, by the last part of their names; without ``targets`` all of them.

    Raises:
        ConfigError: one of ``targets`` names no linear layer, or the scoring head, whose weight is read as it is.
    """
    head = model.get_output_embeddings()
    layers = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if unknown := [name for name in targets if name not in layers]:
        raise ConfigError(f"lora.targets names no linear layer {unknown[0]!r}; {nearest(unknown[0], layers)}")
    return sorted(targets or layers)


def add_adapters(
    model: PreTrainedModel, *, rank: int, alpha: float, targets: Sequence[str], base: str, seed: int
) -> None:
    """Freeze a model's weights, and add fresh adapters to train.

    Args:
        model: has none yet; it computes the same as before.
        rank: columns of B and rows of A.
        alpha: B·A counts alpha/rank times.
        targets: see :func:`target_names`.
        base: folder or name of the model as it is now, which a checkpoint of the adapters names.
        seed: of A.
    """
    from peft import LoraConfig

    names = target_names(model, targets)
    alike: Any = alpha  # peft says int, and only divides it
    config = LoraConfig(
        r=rank, lora_alpha=alike, target_modules=names, base_model_name_or_path=base, task_type="CAUSAL_LM"
    )
    # Seeded without touching the generator that the caller draws from.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, config)


def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's named weights with its adapters added, by the names of a model without adapters."""
    for name, weight in model.named_parameters():
        layer, wrapped, kind = name.rpartition(".base_layer.")
        if wrapped and kind == "weight":
            owner: Any = model.get_submodule(layer)
            with torch.no_grad():
                yield f"{layer}.{kind}", weight + owner.get_delta_weight(_ADAPTER)
        elif ".lora_" not in name:
            yield f"{layer}.{kind}" if wrapped else name, weight


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None]:
    """Let a model compute as if it had no adapters; within, it can be read and not trained."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "base_layer")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_model(model: Any, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write a model into a folder as ``from_pretrained`` loads it.

    Of a model with adapters these alone are written, as ``peft.PeftModel.from_pretrained`` loads them, with the
    fingerprint of their base.

    Args:
        model: the model.
        folder: gets the files.
        weights: those that are written, by the model's names, where it does not hold them itself.
    """
    if not is_adapted(model):
        model.save_pretrained(folder, state_dict=weights)
        return
    model.peft_config[_ADAPTER].save_pretrained(folder)
    own = _adapters(weights or dict(model.named_parameters()))
    tensors = {f"{_PREFIX}{name}": weight.detach().contiguous() for name, weight in own.items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _BASE).write_text(model.base_fingerprint, encoding="utf-8")


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Freeze a model's weights, and add the adapters saved in ``folder``, to train further.

    Raises:
        UsageError: they are damaged, of another kind than LoRA, or were trained beside other weights.
    """
    from peft import LoraConfig

    try:
        # Adapters that others made have no fingerprint.
        if (folder / _BASE).exists() and (folder / _BASE).read_text(encoding="utf-8") != fingerprint(model):
            raise ValueError(f"they were trained beside other weights than {base_of(folder)!r} holds now")
        saved = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / _WEIGHTS).items()}
        _inject(model, LoraConfig.from_pretrained(str(folder)))
        own = _adapters(dict(model.named_parameters()))
        if {name: weight.shape for name, weight in own.items()} != {
            name: weight.shape for name, weight in saved.items()
        }:
            raise ValueError("they do not fit the model, or are of a kind that agentrl can't load")
    except Exception as error:  # peft and safetensors raise all kinds of things on files that are none of theirs
        raise UsageError(f"the adapters in {str(folder)!r} can't be used: {error}") from error
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(saved[name])


def merge(model: Any) -> None:
    """Add a model's adapters to its weights and take them out; afterwards it is one that never had any."""
    wrapped = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    for name, module in wrapped.items():
        layer: Any = module
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())
    model.requires_grad_(True)
    del model.peft_config


def base_of(path: str | Path) -> str | None:
    """Locate the model that the adapters in a folder belong to; None where there are none.

    Beside a checkpoint it is found whatever became of the run folder's path since.

    Raises:
        UsageError: the adapters do not say.
    """
    file = Path(path) / _CONFIG
    if not file.is_file():
        return None
    try:
        named = str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{file} does not name the model that its adapters belong to: {error!r}") from error
    beside = Path(path).resolve().parent / Path(named).name
    return str(beside) if (beside / "config.json").is_file() else named


def fingerprint(model: nn.Module) -> str:
    """Hash a model's weights, without its adapters, such that other weights have another hash."""
    weights = hashlib.sha256()
    slices = Slices(path) if (path := path_of(model)) else None
    for name, parameter in model.named_parameters():
        # An update changes all numbers of most tensors, so the first numbers distinguish two sets of weights.
        if ".lora_" not in name:
            # A skeleton's weights are in its files.
            values = slices.rows(saved_name(name), 0, 64) if slices and parameter.is_meta else parameter
            weights.update(values.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return weights.hexdigest()[:16]


def _inject(model: Any, config: Any) -> None:
    # get_peft_model would return another class, whose base_model is not what it is in transformers.
    from peft import inject_adapter_in_model

    from agentrl.models.adapter import use_lean_adapters

    # Computed now, since a model that ranks share has no weights here when it is saved.
    model.base_fingerprint = fingerprint(model)
    # peft puts adapters onto the device of a layer's weight. A skeleton's has none: meanwhile one number is there.
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.weight.is_meta]
    weights = [layer.weight for layer in layers]
    for layer in layers:
        layer.weight = nn.Parameter(torch.zeros(()).expand(layer.weight.shape))
    inject_adapter_in_model(config, model, _ADAPTER)
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = weight
    for name, weight in model.named_parameters():
        weight.requires_grad_(".lora_" in name)
    use_fast_linear(model)
    use_lean_adapters(model)


def _adapters(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select a model's adapters from its weights, by the names that peft gives them in files."""
    return {name.replace(f".{_ADAPTER}.", "."): weight for name, weight in weights.items() if ".lora_" in name}
