"""A report as lines for people."""

from mcore_train.bench.run import BenchReport


def describe(report: BenchReport) -> list[str]:
    """The lines that `mcore-train bench` prints."""
    limits, (fastest, slowest) = report.limits, report.step_range
    lines = [
        f"{report.parameters / 1e9:.3f} B parameters, {report.precision}, {report.layout}, "
        f"{report.world_size} x {report.device}; {report.micro_batches} micro-batches of "
        f"{report.micro_size} x {report.seq_length} tokens per replica",
        *([] if report.low_precision is None else [report.low_precision]),
        f"step    {report.step_seconds:.4f} s (median; {fastest:.4f} to {slowest:.4f}), "
        f"loss {report.loss:.4f}",
        f"speed   {report.tokens_per_second:,.0f} tokens/s and "
        f"{report.model_flops / 1e12:.4g} model TFLOP/s per device",
        f"limits  {limits.matmul_flops / 1e12:.4g} TFLOP/s matmul ({limits.matmul_size} cubed), "
        f"{limits.copy_bytes / 1e12:.3g} TB/s copy, measured in this process",
        f"ratio   {report.ratio:.4f} of the matmul rate",
    ]
    if report.peak_bytes is not None:
        lines.append(f"memory  {report.peak_bytes / 2**30:.1f} GiB peak")
    if report.split is not None:
        total = report.split.total
        lines.append(f"split   of a profiled step of {total:.4f} s:")
        lines += [
            f"  {name.replace('_', '-'):<14}{seconds:.4f} s  {seconds / total:4.0%}"
            for name, seconds in vars(report.split).items()
        ]
    return lines
