"""Memory and initial values for parameters that have none yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from mcore_parallel.rng import RngKey
from mcore_parallel.spec import ParamSpec, fill_


def place(
    params: Iterable[nn.Parameter],
    specs: Mapping[nn.Parameter, ParamSpec],
    device: torch.device,
    key: RngKey | None,
) -> None:
    """Give those of `params` that are on meta memory on `device`, and initial values.

    The objects stay the same. Values are those of `spec.initialise` with `key`; None leaves zeros.
    """
    for param in params:
        if not param.is_meta:
            continue
        # `zeros_like` of a meta tensor imports torch's symbolic shapes: a second.
        data = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device)
        data.zero_()
        if key is not None:
            fill_(data, specs[param].layout, specs[param].init, key)
        placed = nn.Parameter(data, requires_grad=param.requires_grad)
        placed.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, placed)  # type: ignore[no-untyped-call]
