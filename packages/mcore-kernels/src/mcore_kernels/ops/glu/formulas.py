"""The activations and their derivatives in plain torch, by name; what kernels number them by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

Formula = Callable[[Tensor], Tensor]

_QUICK = 1.702
_TANH = (math.sqrt(2.0 / math.pi), 0.044715)


def _silu_slope(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1.0 + x * (1.0 - s))


def _gelu_slope(x: Tensor) -> Tensor:
    density = (x.square() * -0.5).exp() / math.sqrt(2.0 * math.pi)
    return 0.5 * torch.erfc(x * -math.sqrt(0.5)) + x * density


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    a, b = _TANH
    t = torch.tanh(a * (x + b * x.pow(3)))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t.square()) * a * (1.0 + 3.0 * b * x.square())


def _quick_gelu(x: Tensor) -> Tensor:
    return x * (_QUICK * x).sigmoid()


def _quick_gelu_slope(x: Tensor) -> Tensor:
    s = (_QUICK * x).sigmoid()
    return s * (1.0 + _QUICK * x * (1.0 - s))


def _step(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _squared_relu_slope(x: Tensor) -> Tensor:
    return 2.0 * F.relu(x)


def _sigmoid_slope(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1.0 - s)


FORMULAS: Mapping[str, tuple[Formula, Formula]] = MappingProxyType(
    {
        "silu": (F.silu, _silu_slope),
        "gelu": (F.gelu, _gelu_slope),
        "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
        "quick_gelu": (_quick_gelu, _quick_gelu_slope),
        "relu": (F.relu, _step),
        "squared_relu": (_squared_relu, _squared_relu_slope),
        "sigmoid": (torch.sigmoid, _sigmoid_slope),
    }
)
"""Name → (value, derivative)."""


def check_activation(op: str, activation: str) -> None:
    """ValueError unless there is an activation of that name."""
    if activation not in FORMULAS:
        raise ValueError(f"{op}: activation is one of {', '.join(FORMULAS)}; got {activation!r}")
