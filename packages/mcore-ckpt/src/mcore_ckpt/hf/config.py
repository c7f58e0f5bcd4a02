"""The `config.json` of a folder that is written, and the checks before."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.hf.architecture import Architecture
from mcore_ckpt.hf.format import size_of
from mcore_parallel.mapping import Mapped, TensorMeta


def check_shapes(found: Mapping[str, TensorMeta], asked: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError when tensors of ours are not those that a model has, by name."""
    for name in sorted(asked.keys() | found.keys()):
        if name not in found:
            raise ValueError(f"{name} is missing, which the model has")
        if name not in asked:
            raise ValueError(f"{name} is no tensor of the model")
        if found[name].shape != tuple(asked[name]):
            raise ValueError(
                f"{name} has shape {list(found[name].shape)}, the model's has {list(asked[name])}"
            )


def converted(tensor: Mapped | TensorMeta, dtype: torch.dtype | None) -> TensorMeta:
    """Return what a tensor is when floating-point tensors are turned into `dtype`."""
    change = dtype is not None and tensor.dtype.is_floating_point
    return TensorMeta(tensor.shape, dtype if change and dtype is not None else tensor.dtype)


def config_file(
    architecture: Architecture,
    model: Any,
    base: Mapping[str, Any] | None,
    metas: Mapping[str, TensorMeta],
) -> bytes:
    """Return the contents of `config.json` for tensors of these dtypes.

    Its dtype is that of most bytes, under the names that `base` has for it.
    """
    config = architecture.write_config(model, base)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for meta in metas.values():
        sizes[meta.dtype] += size_of(meta)
    dtype = stored_type(max(sizes, key=lambda dtype: sizes[dtype])).name
    for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]:
        config[key] = dtype
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
