"""Random numbers as pure functions of a key and an index, the same under every parallel layout.

A value depends on `(key, index)` only: never on how many were drawn before, on which rank asks,
or on how the tensor is cut. The generator is a counter run through the finaliser of splitmix64
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the
constants of Stafford's variant 13), in 64-bit integer arithmetic that wraps on every device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_INTEGER = 0xD1B54A32D192ED03  # tells a folded integer from a seed: fold(a) of b ≠ fold(b) of a
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_BLOCK = 1 << 16  # elements per pass on a CPU: dozens of passes over one block stay in its cache
_GPU_BLOCK = 1 << 22  # elements per pass elsewhere, where launches cost and memory is bounded


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(z: int) -> int:
    for shift, factor in _MIX:
        z = ((z ^ (z >> shift)) * factor) & _MASK
    return z ^ (z >> 31)


def _shift_right_(z: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift in place as if unsigned (torch's `>>` copies the sign bit)."""
    return z.bitwise_right_shift_(shift).bitwise_and_((1 << (64 - shift)) - 1)


def _mix_(z: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of splitmix64 in place to an int64 tensor read as unsigned."""
    for shift, factor in _MIX:
        z.bitwise_xor_(_shift_right_(z.clone(), shift)).mul_(_signed(factor))
    return z.bitwise_xor_(_shift_right_(z.clone(), 31))


@dataclass(frozen=True)
class RngKey:
    """The root of one stream of random numbers; `fold` derives independent keys from it."""

    seed: int

    def fold(self, *values: int | str) -> RngKey:
        """Return the key for these values; `fold(a, b)` is `fold(a).fold(b)`.

        Stable over processes, machines and versions: strings are hashed with BLAKE2b.
        """
        state = self.seed & _MASK
        for value in values:
            if isinstance(value, str):
                digest = hashlib.blake2b(value.encode(), digest_size=8, person=b"rngkey").digest()
                word = int.from_bytes(digest, "little")
            else:
                word = _mix_int((value ^ _INTEGER) & _MASK)
            state = _mix_int(_mix_int((state + _GAMMA) & _MASK) ^ word)
        return RngKey(state)


def uniform_bits(key: RngKey, index: torch.Tensor) -> torch.Tensor:
    """Return 64 random bits for each element of the int64 `index`, as int64 of the same shape."""
    z = index.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
    return _mix_(z.mul_(_signed(_GAMMA)).add_(_signed(_mix_int((key.seed + _GAMMA) & _MASK))))


def _unit_doubles(key: RngKey, index: torch.Tensor) -> torch.Tensor:
    """Return float64 in (0, 1]: 53 random bits each, never 0 so that a logarithm is finite."""
    bits = _shift_right_(uniform_bits(key, index), 11)
    return bits.add_(1).to(torch.float64).mul_(2.0**-53)


def counter_uniform(key: RngKey, index: torch.Tensor) -> torch.Tensor:
    """Return float32 uniform in [0, 1) for each element of the int64 `index`, of its shape."""
    bits = _shift_right_(uniform_bits(key, index), 40)
    return bits.to(torch.float32).mul_(2.0**-24)


def counter_normal(key: RngKey, index: torch.Tensor) -> torch.Tensor:
    """Return float32 standard normal for each element of the int64 `index`, of its shape.

    Box and Muller's transform in float64, rounded once at the end.
    """
    flat = index.reshape(-1)
    out = torch.empty(flat.shape, dtype=torch.float32, device=index.device)
    radius_key, angle_key = key.fold("radius"), key.fold("angle")
    size = _BLOCK if index.device.type == "cpu" else _GPU_BLOCK
    for start in range(0, flat.numel(), size):
        block = flat[start : start + size]
        radius = _unit_doubles(radius_key, block).log_().mul_(-2.0).sqrt_()
        angle = _unit_doubles(angle_key, block).mul_(2.0 * math.pi).cos_()
        out[start : start + size].copy_(radius.mul_(angle))
    return out.reshape(index.shape)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        # not in place: torch 2.11's compiler loses the gradient of a result handed back in place
        return x.mul(keep).mul(scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return grads[0].mul(keep).mul_(ctx.scale), None, None


def dropout_mask(
    key: RngKey, rows: torch.Tensor, num_cols: int, p: float, cols_offset: int = 0
) -> torch.Tensor:
    """Return the bool mask `[T, num_cols]` of elements to keep, each with probability `1 − p`.

    Element `(t, c)` depends on `key`, the global row id `rows[t]` and the global column
    `cols_offset + c` only.
    """
    row_bits = uniform_bits(key, rows)
    cols = torch.arange(cols_offset, cols_offset + num_cols, dtype=torch.int64, device=rows.device)
    bits = _mix_(row_bits[:, None] + cols.mul_(_signed(_GAMMA)))
    return _shift_right_(bits, 32) >= round(p * 2.0**32)


def dropout(
    x: torch.Tensor,
    p: float,
    key: RngKey,
    rows: torch.Tensor | None = None,
    cols_offset: int = 0,
) -> torch.Tensor:
    """Return `x` `[T, H]` with each element zero with probability `p`, else divided by `1 − p`.

    The mask is a function of `key`, the global row `rows[t]` (int64 `[T]`; None: 0…T−1) and the
    global column `cols_offset + h`, so every layout that agrees on rows drops the same elements.
    The backward pass keeps the mask as one byte per element.

    Raises:
        ValueError: `p` outside 0 ≤ p < 1, `x` not 2-D, or `rows` of another length than `x`.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} must lie in 0 ≤ p < 1")
    if x.dim() != 2:
        raise ValueError(f"dropout needs a [T, H] tensor, not shape {list(x.shape)}")
    if rows is not None and tuple(rows.shape) != (x.shape[0],):
        raise ValueError(f"{list(rows.shape)} row ids for {x.shape[0]} rows")
    if p == 0.0:
        return x
    if rows is None:
        rows = torch.arange(x.shape[0], dtype=torch.int64, device=x.device)
    keep = dropout_mask(key, rows, x.shape[1], p, cols_offset)
    result: torch.Tensor = _Dropout.apply(x, keep, 1.0 / (1.0 - p))  # type: ignore[no-untyped-call]
    return result


@dataclass
class RngStreams:
    """Named streams of keys with a counter each: the part of randomness that a run must resume.

    `next("dropout")` gives a new key every call; saving and restoring `state_dict` continues every
    stream where it stood.
    """

    seed: int
    counters: dict[str, int] = field(default_factory=dict)

    def next(self, name: str) -> RngKey:
        """Return the next key of stream `name` and advance the stream."""
        count = self.counters.get(name, 0)
        self.counters[name] = count + 1
        return RngKey(self.seed).fold(name, count)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able values."""
        return {"seed": self.seed, "counters": dict(self.counters)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.seed = int(state["seed"])
        self.counters = {str(name): int(count) for name, count in state["counters"].items()}
