"""`mcore-ckpt bench`: how fast checkpoints are on this disk, beside others in the same run."""

from mcore_ckpt.bench.run import BenchReport, run_bench

__all__ = ["BenchReport", "run_bench"]
