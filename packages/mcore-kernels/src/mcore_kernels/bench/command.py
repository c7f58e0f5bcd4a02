"""`mcore-kernels bench` and `mcore-kernels doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from mcore_kernels.bench.measure import Limits, measure_limits
from mcore_kernels.bench.run import Result, bench, benched, machine
from mcore_kernels.bench.work import Sizes
from mcore_kernels.ops import OPERATORS
from mcore_kernels.registry import resolve
from mcore_kernels.target import Target
from mcore_kernels.testing import assert_matches_reference


def run_bench(
    target: Target,
    *,
    op: str | None,
    tokens: int | None,
    hidden: int | None,
    repeats: int,
    every: bool,
    out: Path | None,
) -> int:
    """Print a line per measured call as it is known, and write all to the file `out` as JSON."""
    if repeats < 3:
        raise ValueError(f"--repeats must be at least 3, for a median and a spread; got {repeats}")
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--json {out}: there is no folder {out.parent}")
    ops, device = benched(op), torch.device(target.device_type)
    default = Sizes.of(device)
    sizes = Sizes(
        tokens=default.tokens if tokens is None else tokens,
        hidden=default.hidden if hidden is None else hidden,
    )
    limits = measure_limits(device, target.dtype)
    print(_head(target, device, limits, sizes))
    results = []
    for one in bench(
        ops, target, device=device, limits=limits, sizes=sizes, repeats=repeats, every=every
    ):
        results.append(one)
        print(_line(one), flush=True)
    if out is not None:
        document = {
            "machine": machine(device),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "dtype": str(target.dtype).removeprefix("torch."),
            "tokens": sizes.tokens,
            "hidden": sizes.hidden,
            "copy_bytes_per_s": limits.copy_bytes,
            "matmul_flops_per_s": limits.matmul_flops,
            "results": [one.values() for one in results],
        }
        out.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _head(target: Target, device: torch.device, limits: Limits, sizes: Sizes) -> str:
    return (
        f"{machine(device)['device']}, {target.describe()}, torch {torch.__version__}: copy "
        f"{limits.copy_bytes / 1e9:.1f} GB/s, matmul {limits.matmul_flops / 1e12:.3f} TFLOP/s; "
        f"{sizes.tokens} tokens x {sizes.hidden}\n"
        f"{'operator':<16} {'implementation':<14} {'call':<30} {'median':>10} {'spread':>7} "
        f"{'of limit':>8}"
    )


def _line(one: Result) -> str:
    return (
        f"{one.op:<16} {one.implementation:<14} {one.work:<30} "
        f"{one.timing.median * 1e3:>7.3f} ms {one.timing.spread:>6.0%} {one.ratio:>8.2f}"
    )


def run_doctor(target: Target) -> int:
    """Say what is here and hold what would run to the specification; 1 when something fails."""
    device = torch.device(target.device_type)
    for name, value in machine(device).items():
        print(f"{name:<16} {value}")
    for package in ("mcore-kernels", "triton", "numpy"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"{package:<16} {version}")
    failed = 0
    for op in OPERATORS:
        chosen, start = resolve(op, target=target).name, time.perf_counter()
        try:
            cases = len(assert_matches_reference(op, chosen, target=target, every=4))
            said = f"{cases} cases agree with the specification"
        except Exception as error:  # whatever a kernel does wrong here is what is looked for
            failed += 1
            said = f"FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"{op:<16} {chosen:<10} {time.perf_counter() - start:5.1f} s  {said}", flush=True)
    print(f"{failed} of {len(OPERATORS)} operators failed" if failed else "all is well")
    return int(failed > 0)
