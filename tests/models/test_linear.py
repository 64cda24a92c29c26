"""Linear layers on a CPU: oneDNN's large products and gradients are those of plain PyTorch in higher precision."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from agentrl.models.linear import Linear, linear, use_fast_linear

SHAPES = [(3, 5, 7), (300, 128, 128), (2049, 64, 33)]
"""Rows, inputs and outputs: one product that is too small for oneDNN, two that are not."""


def operands(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, rows, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_gradients_are_those_of_float64(shape: tuple[int, int, int], with_bias: bool) -> None:
    x, weight, bias = operands(*shape)
    inputs = [x, weight, *([bias] if with_bias else [])]
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    got, wanted = linear(*ours), nn.functional.linear(*exact)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    got.sin().sum().backward()
    wanted.sin().sum().backward()
    for mine, other in zip(ours, exact, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_a_gradient_that_nobody_wants_is_not_computed(wanted: tuple[bool, bool]) -> None:
    x, weight, _ = operands(300, 128, 128)
    x.requires_grad_(wanted[0])
    weight.requires_grad_(wanted[1])
    linear(x, weight).sum().backward()
    assert (x.grad is not None, weight.grad is not None) == wanted


def test_transposed_operands_are_understood() -> None:
    x, weight, _ = operands(300, 128, 128)
    across = linear(x[0].T, weight[:, :1].expand(128, 300))
    torch.testing.assert_close(across, x[0].T @ weight[:, :1].expand(128, 300).T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_other_types_are_computed_as_ever(kind: torch.dtype) -> None:
    x, weight, bias = (tensor.to(kind) for tensor in operands(300, 128, 128))
    assert torch.equal(linear(x, weight, bias), nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("shape", [(64, 96), (60, 100), (1500, 1500)])
@torch.inference_mode()
def test_an_inferred_row_has_the_same_bits_in_any_crowd(shape: tuple[int, int]) -> None:
    (x,), weight, bias = operands(300, *shape)
    whole = linear(x, weight, bias)
    torch.testing.assert_close(whole, nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-3)
    for count in (1, 2, 3, 5, 16, 17, 100):
        assert torch.equal(linear(x[7 : 7 + count], weight, bias), whole[7 : 7 + count])
    assert linear(x[:0], weight, bias).shape == (0, shape[1])


def test_a_model_keeps_its_names_and_weights() -> None:
    class Odd(nn.Linear):
        """A layer of somebody else's, which may compute something else."""

    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Odd(8, 2))
    before, x = copy.deepcopy(model), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    use_fast_linear(model)
    assert [type(layer) for layer in model] == [Linear, nn.ReLU, Odd]
    assert list(model.state_dict()) == list(before.state_dict())
    assert torch.equal(model(x), before(x))
    assert type(copy.deepcopy(model)[0]) is Linear
