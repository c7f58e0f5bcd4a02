"""Operators beside the limits of the machine, measured in the same run."""

from mcore_kernels.bench.measure import Limits, Timing, measure_limits, timing
from mcore_kernels.bench.run import Result, bench
from mcore_kernels.bench.work import BENCHED, Sizes, Work, works

__all__ = [
    "BENCHED",
    "Limits",
    "Result",
    "Sizes",
    "Timing",
    "Work",
    "bench",
    "measure_limits",
    "timing",
    "works",
]
