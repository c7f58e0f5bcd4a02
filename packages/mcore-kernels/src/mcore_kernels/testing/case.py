"""The arguments of one compared call, and tensors that do not lie in one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Make = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of one call.

    Attributes:
        name: what is special about it.
        arguments: by parameter name; float tensors are float64 and get cast to the dtype tested.
        grads: names of the arguments whose gradients are compared.
        fixed: names of the float tensors that stay float32 whatever the dtype tested.
        slack: how many times the usual tolerance is granted.
        floor: size of the numbers that cancel in the results, so that rounding shows.
        expanded: the gradient of the output is one number expanded, as `sum().backward()` gives.
    """

    name: str
    arguments: dict[str, Any]
    grads: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    slack: float = 1.0
    floor: float = 0.0
    expanded: bool = False


def scattered(x: Tensor) -> Tensor:
    """Equal to x, but neither its rows nor its columns are neighbours in memory."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
    view = wide[..., 1::2]
    view.copy_(x)
    return view


def slice_of_rows(x: Tensor) -> Tensor:
    """Equal to x, a slice of the columns of a wider tensor."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
    view = wide[..., 1:-2]
    view.copy_(x)
    return view


def with_nan(x: Tensor) -> Tensor:
    """x with a NaN in its middle."""
    x = x.clone()
    x.view(-1)[x.numel() // 2] = torch.nan
    return x


def ends(lengths: list[int]) -> Tensor:
    """The bounds of packed segments of these lengths, int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
