"""TRL's side of ``end_to_end.py``: ``GRPOTrainer`` with its own generation; runs where TRL is installed."""

import tempfile
import time

import torch
from datasets import Dataset
from end_to_end_common import Stopwatch, Turns, Workload, reward_of, workload_from
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Watch(TrainerCallback):
    """Takes turns at the borders between rollout batches, and times what lies between two of them."""

    def __init__(self, turns: Turns, load: Workload, prompt_tokens: int) -> None:
        self._turns = turns
        self._updates = load.updates
        self._prompt_tokens = prompt_tokens
        self._watch = Stopwatch()
        self._generated = 0.0
        self._lengths: list[int] = []

    def reward(self, completions: list, completion_ids: list, **_: object) -> list[float]:
        """TRL asks for rewards as soon as the whole batch is generated."""
        self._generated = time.perf_counter()
        self._lengths = [len(ids) for ids in completion_ids]
        return [reward_of(messages[0]["content"]) for messages in completions]

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """Wait for the first turn."""
        self._turns.ready()
        self._wait(control)

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        """After the last update of a rollout batch, report and wait."""
        if state.global_step % self._updates:
            return
        phases = {
            "generate": self._generated - self._watch.began,
            "score and update": time.perf_counter() - self._generated,
        }
        self._turns.report(self._watch.step(self._lengths, self._prompt_tokens, phases))
        self._wait(control)

    def _wait(self, control: object) -> None:
        control.should_training_stop = not self._turns.mine()
        self._watch = Stopwatch()


def settings(load: Workload, folder: str) -> GRPOConfig:
    """TRL's defaults, but for what the workload says and what only costs time: logs, saves, mixed precision."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        max_steps=1_000_000,
        learning_rate=load.lr,
        lr_scheduler_type="constant",
        per_device_train_batch_size=load.episodes // load.updates,
        gradient_accumulation_steps=1,
        steps_per_generation=load.updates,
        num_generations=load.group_size,
        max_completion_length=load.longest,
        generation_kwargs={"min_new_tokens": load.shortest if load.stop_ids else load.longest},
        temperature=1.0,
        beta=0.0,
    )


def main() -> None:
    """Take part in a benchmark."""
    load = workload_from(None, "Trains with TRL.")
    turns = Turns()
    torch.set_num_threads(load.threads)
    tokenizer = AutoTokenizer.from_pretrained(load.model)
    model = AutoModelForCausalLM.from_pretrained(load.model, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = list(load.stop_ids) or tokenizer.eos_token_id
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in load.prompts]
    opening = tokenizer.apply_chat_template(rows[0]["prompt"], tokenize=True, add_generation_prompt=True)
    watch = Watch(turns, load, len(opening["input_ids"]))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=watch.reward,
            args=settings(load, folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.train()


if __name__ == "__main__":
    main()
