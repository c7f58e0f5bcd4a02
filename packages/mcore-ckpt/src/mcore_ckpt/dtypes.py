"""Which torch dtypes a checkpoint holds, and how each one is stored.

Types that every zarr v3 reader knows are stored as themselves. bfloat16 and the 8-bit floats are
stored as their bits (`uint16`, `uint8`); the attribute `dtype` of the array names the real type.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_parallel.layout import LayoutTensor

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("mcore_ckpt needs a little-endian machine")

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class StoredType:
    """A dtype of the format: its name, the torch dtype and the zarr data type of its arrays."""

    name: str
    torch: torch.dtype
    zarr: str
    fill_value: Any

    @property
    def itemsize(self) -> int:
        """Bytes per element, the same in memory and on disk."""
        return self.torch.itemsize

    @property
    def as_bits(self) -> bool:
        """Whether the array holds the bits of the elements rather than their values."""
        return self.name != self.zarr


_BITS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
_PLAIN = {
    "float64": 0.0,
    "float32": 0.0,
    "float16": 0.0,
    "int64": 0,
    "int32": 0,
    "int16": 0,
    "int8": 0,
    "uint64": 0,
    "uint32": 0,
    "uint16": 0,
    "uint8": 0,
    "bool": False,
    "complex64": [0.0, 0.0],
    "complex128": [0.0, 0.0],
}
STORED_TYPES: dict[str, StoredType] = {
    **{
        name: StoredType(name=name, torch=getattr(torch, name), zarr=name, fill_value=fill)
        for name, fill in _PLAIN.items()
    },
    **{
        name: StoredType(name=name, torch=getattr(torch, name), zarr=bits, fill_value=0)
        for name, bits in _BITS.items()
    },
}
_BY_TORCH = {stored.torch: stored for stored in STORED_TYPES.values()}


def stored_type(dtype: torch.dtype | str) -> StoredType:
    """Return how `dtype` (a torch dtype, or its name in the format) is stored.

    Raises:
        ValueError: the format has no such dtype.
    """
    found = STORED_TYPES.get(dtype) if isinstance(dtype, str) else _BY_TORCH.get(dtype)
    if found is None:
        known = ", ".join(STORED_TYPES)
        raise ValueError(f"dtype {dtype} cannot be stored; the format has {known}")
    return found


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether loading may turn `source` into `target`: equal, or both floating point."""
    return source == target or (source.is_floating_point and target.is_floating_point)


def check_dense(tensors: Mapping[str, LayoutTensor]) -> None:
    """Raise ValueError for a tensor whose elements are not all in memory; names its key."""
    for key, value in tensors.items():
        if value.tensor.is_meta:
            raise ValueError(
                f"{key} is on the meta device and has no values: load or fill it first"
            )
        if value.tensor.layout is not torch.strided:
            raise ValueError(f"{key} is {value.tensor.layout}: save its dense form, .to_dense()")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements on the CPU, row-major, conjugates and negatives as they are seen."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return a CPU tensor as the numpy array that is stored for it (shares memory)."""
    stored = stored_type(tensor.dtype)
    if stored.as_bits:
        tensor = tensor.view(getattr(torch, stored.zarr))
    array: Array = tensor.numpy()
    return array


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a CPU tensor into another tensor; in this thread alone where nothing is converted.

    (torch's own copies are shared between as many threads as it may use, for each caller.)
    """
    target = target.detach()
    if target.is_cpu and target.dtype == source.dtype:
        np.copyto(to_numpy(target), to_numpy(source))
    else:
        target.copy_(source)


def from_numpy(array: Array, dtype: str) -> torch.Tensor:
    """Return a stored numpy array as a tensor of the real dtype (shares memory)."""
    tensor = torch.from_numpy(np.asarray(array))
    stored = stored_type(dtype)
    return tensor.view(stored.torch) if stored.as_bits else tensor
