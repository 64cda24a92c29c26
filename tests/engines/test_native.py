"""The step in C: which models it takes, that it computes what they do, and how it is compiled and kept."""

import copy
import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from agentrl.engines.base import Sampling
from agentrl.engines.native.step import NativeStep
from agentrl.engines.transformers import TransformersEngine
from agentrl.models.attention import NAME
from agentrl.models.linear import use_fast_linear
from agentrl.native import Unavailable, build

from .asking import ask, ragged, together

SIZES = {"vocab_size": 300, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
         "intermediate_size": 200, "num_key_value_heads": 2}  # fmt: skip
HEADS = {**SIZES, "head_dim": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
TAKEN: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    # Fills no chunk of the sums over the vocabulary.
    "wide": lambda: hf.LlamaConfig(**{**SIZES, "vocab_size": 1500}),
    "llama 3": lambda: hf.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "biases": lambda: hf.LlamaConfig(**SIZES, attention_bias=True),
    "yarn": lambda: hf.Qwen3Config(**HEADS, rope_parameters=YARN),
    "mistral": lambda: hf.MistralConfig(**HEADS, sliding_window=20),
    "qwen 2": lambda: hf.Qwen2Config(**SIZES),
    "qwen 3": lambda: hf.Qwen3Config(**HEADS),
    "gemma": lambda: hf.GemmaConfig(**HEADS),
    "gemma 2": lambda: hf.Gemma2Config(**HEADS, sliding_window=20),
    "gemma 3": lambda: hf.Gemma3TextConfig(**HEADS, sliding_window=20),
    "smollm 3": lambda: hf.SmolLM3Config(**SIZES, pad_token_id=0),
    "granite": lambda: hf.GraniteConfig(**SIZES, residual_multiplier=0.5, logits_scaling=4.0, embedding_multiplier=3.0),
    "glm": lambda: hf.GlmConfig(**HEADS, pad_token_id=0),
    "glm 4": lambda: hf.Glm4Config(**HEADS, pad_token_id=0),
    "phi 3": lambda: hf.Phi3Config(**SIZES, pad_token_id=0),
    "ernie 4.5": lambda: hf.Ernie4_5Config(**HEADS),
    "seed-oss": lambda: hf.SeedOssConfig(**HEADS),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "olmo 2": (lambda: hf.Olmo2Config(**SIZES), "its layers consist of"),
    "cohere": (lambda: hf.CohereConfig(**SIZES), "is laid out in another way"),
    "qwen 3 moe": (
        lambda: hf.Qwen3MoeConfig(**HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        "is laid out in another way: 'Qwen3Moe",
    ),
    "starcoder 2": (lambda: hf.Starcoder2Config(**SIZES), "is laid out in another way"),
    "dynamic": (lambda: hf.LlamaConfig(**SIZES, rope_parameters=DYNAMIC), "depend on the longest row"),
}


def made(config: Any) -> Any:
    """A model whose weights, biases and norms are all random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = hf.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for weights in model.parameters():
                weights.add_(torch.randn_like(weights) * (0.1 if weights.ndim == 1 else 0.06))
    model.set_attn_implementation(NAME)
    use_fast_linear(model)
    return model


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A folder for compiled steps that is empty, and a process that has loaded none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CFLAGS", "-O0")  # compiles in a seventh of the time
    build.library.cache_clear()
    yield tmp_path / "agentrl" / "native"
    build.library.cache_clear()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", TAKEN)
def test_it_samples_as_the_model_itself_does(name: str) -> None:
    """Turns of rows of all lengths, some of which go on: equal tokens, and log-probs up to rounding."""
    model, completions = made(TAKEN[name]()), []
    for native in (True, False):
        engine = TransformersEngine(copy.deepcopy(model), slots=5, max_length=512, native=native)
        assert engine.step.startswith("native ") is native
        rows = [(*row, *range(3, 60 * (number % 3 + 1))) for number, row in enumerate(ragged(7))]
        turns = [_turns(engine, rows)]
        rows = [(*row, *turn.token_ids, 7, 8, 9) for row, turn in zip(rows, turns[0], strict=True)]
        completions.append([*turns[0], *_turns(engine, rows)])
    for ours, theirs in zip(*completions, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)


def _turns(engine: TransformersEngine, rows: list[tuple[int, ...]]) -> Any:

    kinds = [Sampling(max_tokens=6, temperature=(0.0, 0.7, 1.0, 1.5)[number % 4]) for number in range(len(rows))]
    return together(
        *(engine.generate(row, kind, seed=n) for n, (row, kind) in enumerate(zip(rows, kinds, strict=True)))
    )


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_know_is_refused_with_a_reason_and_computed_by_pytorch(name: str) -> None:
    config, why = REFUSED[name]
    engine = TransformersEngine(made(config()), slots=2, max_length=128, native=True)
    assert engine.step.startswith("PyTorch, since ") and why in engine.step
    assert len(ask(engine).token_ids) == 8


@pytest.mark.usefixtures("compiler")
def test_a_model_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(hf.LlamaConfig(**SIZES))
    model.model.layers[1].mlp.register_forward_hook(lambda _m, _g, out: 1.01 * out)
    with pytest.raises(Unavailable, match="it computes another function than LlamaForCausalLM"):
        NativeStep(model, 2, 64)


@pytest.mark.usefixtures("compiler")
def test_other_types_are_refused() -> None:
    model = made(hf.LlamaConfig(**SIZES)).to(torch.bfloat16)
    with pytest.raises(Unavailable, match="float32 on a CPU, and the model is bfloat16 on cpu"):
        NativeStep(model, 2, 64)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("tied", [True, False])
def test_its_copy_of_the_weights_is_the_only_one(tied: bool) -> None:
    sizes = {**SIZES, "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 512}
    model = made(hf.LlamaConfig(**sizes, tie_word_embeddings=tied))
    engine = TransformersEngine(model, slots=2, max_length=128, native=True)
    own = sum(weight.nbytes for weight in model.parameters())
    assert sum(part.nbytes for part in engine._compute._weights._kept) < 1.02 * own + 8 * 128 * 32
    gone = weakref.ref(model.lm_head)
    del model
    gc.collect()
    assert gone() is None and len(ask(engine).token_ids) == 8


@pytest.mark.usefixtures("compiler")
def test_what_is_not_finite_is_passed_on_and_ends(own_cache: Path) -> None:
    model = made(hf.LlamaConfig(**SIZES))
    step = NativeStep(model, 1, 64)
    broken = torch.full((2, 64), float("nan"))
    tokens, logprobs = step.sample(broken, [1.0, 0.0], [1, 2], [0, 0])
    assert all(0 <= token < 300 for token in tokens) and logprobs[0] != logprobs[0]


def test_without_a_compiler_pytorch_computes_and_says_why(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(own_cache))
    monkeypatch.delenv("CC", raising=False)
    engine = TransformersEngine(made(hf.LlamaConfig(**SIZES)), slots=2, max_length=128, native=True)
    assert engine.step == (
        "PyTorch, since there is no C compiler: install one, for example with apt-get install gcc libc6-dev"
    )
    monkeypatch.setenv("CC", "gone-cc -m64")
    with pytest.raises(Unavailable, match=r"\$CC is 'gone-cc -m64', which is not there"):
        build.library()


def test_a_compiler_that_fails_says_why(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'step.c:9: fatal error: math.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(Unavailable, match=r"cc can't compile the C code: step\.c:9: fatal error: math\.h"):
        build.library()
    assert not [*own_cache.iterdir()], "nothing half-made is left"


@pytest.mark.usefixtures("compiler")
def test_it_is_compiled_once_for_each_set_of_options(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build.library()
    (compiled,) = own_cache.iterdir()
    assert compiled.name == f"step-{loaded.digest}.so" and own_cache.stat().st_mode & 0o777 == 0o700
    made_at = compiled.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library().digest == loaded.digest and compiled.stat().st_mtime_ns == made_at
    monkeypatch.setenv("CFLAGS", "-O0 -DOTHER")
    build.library.cache_clear()
    assert build.library().digest != loaded.digest and len([*own_cache.iterdir()]) == 2


@pytest.mark.usefixtures("compiler")
def test_what_was_cut_short_is_compiled_again(own_cache: Path) -> None:
    own_cache.mkdir(parents=True, mode=0o700)
    compiled = own_cache / f"step-{build._digest(build.find_compiler())}.so"
    compiled.write_bytes(b"\x7fELF")
    compiled.chmod(0o700)
    assert build.library().calls.panel() > 0 and compiled.stat().st_size > 4


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("wrong", ["open", "file", "link", "foreign"])
def test_nothing_is_loaded_from_where_others_may_write(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    digest = build.library().digest
    planted = own_cache / f"step-{digest}.so"
    planted.unlink()
    planted.write_bytes(b"planted")
    loaded: list[Path] = []
    monkeypatch.setattr(build, "_load", lambda path, digest: loaded.append(path))
    planted.chmod(0o700)
    if wrong == "open":
        own_cache.chmod(0o770)
    elif wrong == "file":
        planted.chmod(0o777)
    elif wrong == "link":
        planted.rename(own_cache / "elsewhere")
        planted.symlink_to(own_cache / "elsewhere")
    else:
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(planted, 12345, -1)
    build.library.cache_clear()
    build.library()
    assert loaded and planted not in loaded


SAME = "(test_same_bits and not False) or threads"
"""Picks the tests of the same bits, where computed in C, and those of several threads."""
WATCHING = ["tests/engines/test_same_bits.py", "tests/models/test_native_attention.py", "tests/models/test_norm.py"]


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    "flags", ["-march=x86-64-v2", "-march=x86-64-v3", "-fsanitize=address,undefined -fno-sanitize-recover=all"]
)
def test_other_processors_and_sanitizers_find_the_same(flags: str, tmp_path: Path) -> None:
    """The tests of the same bits, with code compiled for other vectors, or with every access checked."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CFLAGS": flags, "OMP_NUM_THREADS": "1"}
    if "sanitize" in flags:
        runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
        env |= {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", SAME, *WATCHING]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert [*(tmp_path / "agentrl" / "native").iterdir()]


@pytest.mark.usefixtures("compiler")
def test_several_threads_give_the_same_bits() -> None:
    model = made(hf.LlamaConfig(**{**SIZES, "hidden_size": 512, "intermediate_size": 1024}))
    step, results = NativeStep(model, 3, 512), []
    draw = random.Random(0)
    rows = [[draw.randrange(300) for _ in range(length)] for length in (300, 7, 1)]
    for threads in (1, 2, 5):
        step._threads = threads
        step.forget()
        hidden = step.forward([0, 1, 2], [0, 0, 0], rows)
        results.append((hidden.tolist(), step.sample(hidden, [1.0] * 3, [1, 2, 3], [0] * 3)))
    assert results[0] == results[1] == results[2]
