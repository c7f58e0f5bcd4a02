"""Which arguments the Triton kernel takes (apart from it: asked without triton)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
QUERIES = (torch.float32, torch.bfloat16, torch.float16)


def limits(q: Tensor, key_cache: Tensor, value_cache: Tensor, **rest: Any) -> str | None:
    """None, or why the kernel cannot take these arguments."""
    size = max(q.shape[2], value_cache.shape[3])
    if size > MAX_HEAD_DIM:
        return f"a head size of {size}, at most {MAX_HEAD_DIM}"
    if q.dtype not in QUERIES:
        return f"{q.dtype}; the kernel computes in float32"
    for cache in (key_cache, value_cache):
        if cache.dtype not in (*QUERIES, torch.float8_e4m3fn):
            return f"a cache of {cache.dtype}"
        if cache.stride(3) != 1:
            return "a cache whose heads do not lie in one piece"
    return None
