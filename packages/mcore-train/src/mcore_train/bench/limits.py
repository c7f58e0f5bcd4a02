"""What the device in hand can do: the rates that a training step is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mcore_train.bench.clock import synchronise

_GPU_MATMUL, _CPU_MATMUL = 8192, 1024
_GPU_COPY, _CPU_COPY = 1 << 30, 1 << 25


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Measured rates of one device.

    matmul_flops: floating-point operations per second of a square matrix product of `matmul_size`
    in the training precision. copy_bytes: bytes read plus bytes written per second by a copy.
    """

    matmul_flops: float
    matmul_size: int
    copy_bytes: float


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure both rates of `device`; takes about a second."""
    size = _GPU_MATMUL if device.type == "cuda" else _CPU_MATMUL
    return Limits(
        matmul_flops=matmul_rate(device, dtype, size),
        matmul_size=size,
        copy_bytes=copy_rate(device, _GPU_COPY if device.type == "cuda" else _CPU_COPY),
    )


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int, repeats: int = 20) -> float:
    """Floating-point operations per second of `repeats` products of random size x size matrices.

    Random, since a device that is limited by power multiplies zeros faster.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / _seconds(lambda: a @ b, device, repeats)


def copy_rate(device: torch.device, numbytes: int, repeats: int = 10) -> float:
    """Bytes per second, read and written together, of copying `numbytes` within the device."""
    source = torch.randn(numbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() * 4 / _seconds(lambda: target.copy_(source), device, repeats)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Mean seconds of one call over `repeats`, after a few that do not count."""
    for _ in range(3):
        run()
    synchronise(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronise(device)
    return (time.perf_counter() - start) / repeats
