"""How fast training runs, as a ratio to what the device can do in the same process."""

from mcore_train.bench.limits import Limits, copy_rate, matmul_rate, measure_limits
from mcore_train.bench.run import BenchOptions, BenchReport, bench
from mcore_train.bench.split import TimeSplit, classify

__all__ = [
    "BenchOptions",
    "BenchReport",
    "Limits",
    "TimeSplit",
    "bench",
    "classify",
    "copy_rate",
    "matmul_rate",
    "measure_limits",
]
