"""RMSNorm in C: which norms it takes, and that its values and gradients are those of float64."""

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agentrl.models.norm import RMSNorm, use_fast_norms

pytestmark = pytest.mark.usefixtures("one_thread")


class OddRMSNorm(LlamaRMSNorm):
    """One that has all of its attributes, and computes something else in the type that it is trained in."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (self.weight * super().forward(hidden_states)).to(hidden_states.dtype)


def made(kind: Any, size: int = 48) -> Any:
    norm: Any = kind(size)
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(size))
    return norm


def fast(kind: Any, size: int = 48) -> Any:
    norm = torch.nn.Sequential(made(kind, size))
    use_fast_norms(norm)
    return norm[0]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_plain_norms_are_taken_and_stay_what_they_are(kind: Any) -> None:
    plain, ours = made(kind), fast(kind)
    assert type(ours) is RMSNorm and plain.state_dict().keys() == ours.state_dict().keys()
    x = torch.randn(3, 7, 48)
    with torch.inference_mode():
        assert torch.equal(ours(x), plain(x)), "the engine's bits stay"
    for same in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        torch.testing.assert_close(same(x), plain(x))
    for x in (torch.randn(3, 48, dtype=torch.bfloat16), torch.randn(3, 48, dtype=torch.float64)):
        assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("kind", [GemmaRMSNorm, OddRMSNorm])
def test_others_are_left_alone(kind: Any) -> None:
    assert type(fast(kind)) is kind


def test_all_norms_of_a_model_are_taken() -> None:
    sizes = {"vocab_size": 50, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    model = hf.AutoModelForCausalLM.from_config(hf.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    use_fast_norms(model)
    assert [type(module) for name, module in model.named_modules() if name.endswith("norm")] == [RMSNorm] * 5


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (255, 32), (1000, 48), (700, 1024), (5, 40)])
def test_values_and_gradients_are_those_of_float64_on_any_number_of_threads(rows: int, size: int) -> None:
    norm = fast(LlamaRMSNorm, size)
    x = torch.randn(2, rows, size).mul_(torch.logspace(-4, 2, rows)[:, None]).requires_grad_()
    upstream = torch.randn(2, rows, size)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, norm.weight)]
    out = exact[1] * exact[0] * torch.rsqrt(exact[0].pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    expected = [out, *torch.autograd.grad((out * upstream).sum(), exact)]
    seen: list[list[torch.Tensor]] = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        ours = norm(x)
        seen.append([ours, *torch.autograd.grad((ours * upstream).sum(), (x, norm.weight))])
    torch.set_num_threads(1)
    for ours, theirs in zip(seen[0], expected, strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    assert (type(seen[0][0].grad_fn).__name__ == "_NormBackward") is (size % 16 == 0)
    for others in seen[1:]:
        assert all(torch.equal(*pair) for pair in zip(seen[0], others, strict=True))
