"""Time, and what the machine can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH = {"cuda": 1 << 28, "cpu": 1 << 26}
_COPY = {"cuda": 1 << 30, "cpu": 1 << 27}
_MATMUL = {"cuda": 8192, "cpu": 768}
_HEAD_START = 2_000_000
"""Cycles that a GPU waits before what is timed, about a millisecond: the host has then asked for
all of it, and what is measured is the GPU's work."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call: the median, and the first and third quartile."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a part of the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a device does at best.

    copy_bytes: bytes read and written per second by a copy. matmul_flops: operations per second of
    a large square product in the dtype.
    """

    copy_bytes: float
    matmul_flops: float

    def seconds(self, *, num_bytes: float, flops: float) -> float:
        """The least time for so many bytes moved and so many operations, whichever is longer."""
        return max(num_bytes / self.copy_bytes, flops / self.matmul_flops)


def timing(run: Callable[[], object], device: torch.device, repeats: int) -> Timing:
    """Time `run` so many times, after two that do not count.

    What lies in the caches is thrown out before each by writing a buffer larger than they are.
    """
    flush = torch.empty(_FLUSH[device.type], dtype=torch.int8, device=device)
    for _ in range(2):
        run()
    times = [_once(run, flush, device) for _ in range(repeats)]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median=median, low=low, high=high)


def _once(run: Callable[[], object], flush: torch.Tensor, device: torch.device) -> float:
    flush.zero_()
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) * 1e-3


def measure_limits(device: torch.device, dtype: torch.dtype, repeats: int = 9) -> Limits:
    """Measure both limits of a device, on random numbers: zeros are multiplied faster."""
    source = torch.randn(_COPY[device.type] // 4, device=device)
    target = torch.empty_like(source)
    copy = timing(lambda: target.copy_(source), device, repeats)
    n = _MATMUL[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = timing(lambda: a @ b, device, repeats)
    return Limits(
        copy_bytes=2.0 * source.numel() * 4 / copy.median, matmul_flops=2.0 * n**3 / product.median
    )
