"""What there is today, for those who look for a setting that other trainers have."""

import re
from collections.abc import Iterable

_ONE_PROCESS = "a run is one process on one device, model.device: nothing is spread over devices or machines"
_INSTEAD = {
    "lora qlora peft adapter quantization quantize bit bits": "there is no LoRA and no quantization: all weights learn",
    "vllm sglang tgi engine backend server": "there is one engine, agentrl's own on transformers, inside the run",
    "gpu gpus cuda devices node nodes ray world ddp fsdp deepspeed zero accelerate megatron parallel": _ONE_PROCESS,
    "wandb tensorboard mlflow log logger logging": "a run writes metrics.jsonl, one line a step, and report.html",
    "kl ref reference": "there is no reference model and no penalty on leaving it: the loss limits each update",
    "critic gae vf lam lambda": "there is no critic: algo.advantage compares the episodes of a group",
    "generations samples n": "set rollout.group_size, the episodes per task",
    "batch micro accumulation": "set rollout.tasks and group_size, optim.minibatches, and optim.max_tokens for memory",
    "response completion new length": "set rollout.turn_tokens for a turn and rollout.episode_tokens for the whole",
    "rate": "set optim.lr",
    "dataset datasets data": "the environment has the tasks: set env.id, and env.args.data where it takes one",
}
"""Words in a setting's name, and what to tell whoever tries it."""


def hint(names: Iterable[str]) -> str:
    """What there is in place of a setting; empty where its name reminds of nothing.

    Args:
        names: its section and key, and the keys in it.
    """
    words = {word for name in names for word in re.split(r"[^a-z]+", name.lower())}
    return next((told for known, told in _INSTEAD.items() if words & set(known.split())), "")
