"""Argument checks of the small operators, and what their autograd keeps."""

import pytest
import torch

from mcore_kernels import Kernels, resolve

kernels = Kernels()


def test_swiglu_needs_two_halves() -> None:
    with pytest.raises(ValueError, match="so it is even; got 7, nearest 6 or 8"):
        kernels.swiglu(torch.ones(2, 7))


def test_gelu_knows_two_formulas() -> None:
    with pytest.raises(ValueError, match="approximate is 'none' or 'tanh', got 'fast'"):
        kernels.gelu(torch.ones(2), "fast")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "swish"}, "glu: activation is one of silu, gelu, .*; got 'swish'"),
        ({"limit": 0.0}, "glu: limit must be positive, got 0.0"),
        ({"weights": torch.ones(3)}, r"glu: weights are one per row, \(2,\), got \(3,\)"),
    ],
)
def test_gated_activations_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.glu(torch.ones(2, 6), **arguments)
    with pytest.raises(ValueError, match="it is even; got 7, nearest 6 or 8"):
        kernels.glu(torch.ones(2, 7))


def test_the_clamped_activation_of_gpt_oss() -> None:
    """Against its formula as published: the gate from above, the other from both sides."""
    gate, up = torch.randn(2, 50, 6).mul(6)
    clamped, linear = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (linear + 1) * clamped * torch.sigmoid(1.702 * clamped)
    found = kernels.glu(torch.cat((gate, up), -1), activation="quick_gelu", limit=7.0, offset=1.0)
    torch.testing.assert_close(found, expected)


def test_activations_keep_their_arguments_only() -> None:
    """What the backward needs is the input; nothing of its size is kept beside it."""
    kept: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    x = torch.randn(3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = kernels.glu(x, activation="gelu_tanh", limit=1.0)
        z = kernels.activation(x, activation="squared_relu")
    assert [one.data_ptr() for one in kept] == [x.data_ptr()] * 2
    (y.sum() + z.sum()).backward()


def test_a_residual_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"one shape, got \(2, 8\) and \(1, 8\)"):
        kernels.add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), 1e-5)


@pytest.mark.parametrize("name", ["reference", "eager", "invariant"])
def test_a_sum_in_one_pass_is_two_operators(name: str) -> None:
    """Bit for bit in 16 bits, gradients too: whoever sums before the norm gets the same."""
    fused = resolve("add_rms_norm", target=kernels.target, require=name)
    norm = resolve("rms_norm", target=kernels.target, require=name)
    inputs = [*torch.randn(2, 9, 32).bfloat16().unbind(0), torch.randn(32).bfloat16()]
    grads = torch.randn(2, 9, 32).bfloat16().unbind(0)
    found = []
    for in_one_pass in (True, False):
        x, residual, weight = leaves = [one.clone().requires_grad_() for one in inputs]
        if in_one_pass:
            y, total = fused(x, residual, weight, 1e-5)
        else:
            total = x + residual
            y = norm(total, weight, 1e-5)
        found.append([y, total, *torch.autograd.grad((y, total), leaves, grads)])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_gradients_of_a_norm_in_two_micro_batches_add_up() -> None:
    weight = torch.ones(8, requires_grad=True)
    for _ in range(2):
        kernels.rms_norm(torch.randn(3, 8), weight, 1e-5).sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (8,)


def test_frozen_weights_and_inputs() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    kernels.rms_norm(x, torch.ones(8), 1e-5).sum().backward()
    assert x.grad is not None
    weight = torch.ones(8, requires_grad=True)
    kernels.rms_norm(torch.randn(3, 8), weight, 1e-5).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("name", ["reference", "eager"])
def test_rms_norm_of_heads_that_lie_in_another_order(name: str) -> None:
    """Heads cut out of wider rows, and gradients with the heads in front: values alone count."""
    op = resolve("rms_norm", target=kernels.target, require=name)
    rows, weight = torch.randn(5, 6, 4), torch.randn(4)
    heads, grad = rows[:, 1:3], torch.randn(2, 5, 4).transpose(0, 1)
    results = []
    for x, dy in ((heads, grad), (heads.contiguous(), grad.contiguous())):
        leaves = [x.detach().requires_grad_(), weight.clone().requires_grad_()]
        out = op(*leaves, 1e-5)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dy)])
    for strided, plain in zip(*results, strict=True):
        torch.testing.assert_close(strided, plain)
