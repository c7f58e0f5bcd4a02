"""Argument checks of the small operators, and what their autograd keeps."""

import pytest
import torch

from mcore_kernels import Kernels

kernels = Kernels()


def test_swiglu_needs_two_halves() -> None:
    with pytest.raises(ValueError, match="so it is even; got 7, nearest 6 or 8"):
        kernels.swiglu(torch.ones(2, 7))


def test_gelu_knows_two_formulas() -> None:
    with pytest.raises(ValueError, match="approximate is 'none' or 'tanh', got 'fast'"):
        kernels.gelu(torch.ones(2), "fast")


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
