"""Measuring implementations, and what is said of it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mcore_kernels.bench.composites import COMPOSITES, composite
from mcore_kernels.bench.measure import Limits, Timing, timing
from mcore_kernels.bench.work import BENCHED, Sizes, Work, works
from mcore_kernels.ops import OPERATORS
from mcore_kernels.registry import nearest, operator_named, resolve
from mcore_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured call of an implementation.

    Attributes:
        op: the operator.
        implementation: its name.
        work: which call.
        timing: how long it took.
        ratio: the least time that the machine's limits allow, divided by the median.
    """

    op: str
    implementation: str
    work: str
    timing: Timing
    ratio: float

    def values(self) -> dict[str, Any]:
        """As numbers and strings."""
        rest = {name: getattr(self, name) for name in ("op", "implementation", "work", "ratio")}
        return {**rest, **{f"{name}_s": value for name, value in asdict(self.timing).items()}}


def benched(op: str | None) -> Sequence[str]:
    """The operators to measure: one, or all; ValueError for one that there is nothing for."""
    if op is None:
        return [*(name for name in OPERATORS if name in BENCHED), *COMPOSITES]
    if op in COMPOSITES:
        return [op]
    if operator_named(op).name not in BENCHED:
        raise ValueError(f"bench: nothing is measured of {op!r}; {nearest(op, BENCHED)}")
    return [op]


def bench(
    ops: Sequence[str],
    target: Target,
    *,
    device: torch.device,
    limits: Limits,
    sizes: Sizes,
    repeats: int,
    every: bool = False,
) -> Iterator[Result]:
    """Measure the chosen implementation of each operator; with `every`, all that can run."""

    def measured(op: str, name: str, work: Work) -> Result:
        found = timing(work.run, device, repeats)
        least = limits.seconds(num_bytes=work.num_bytes, flops=work.flops)
        return Result(
            op=op, implementation=name, work=work.name, timing=found, ratio=least / found.median
        )

    for op in ops:
        if op in COMPOSITES:
            for name, work in composite(op, target, sizes, every=every):
                yield measured(op, name, work)
            continue
        names = [resolve(op, target=target).name]
        if every:
            able = [one.name for one in OPERATORS[op].ranked() if one.refusal(target) is None]
            names = able
        for name in names:
            call = resolve(op, target=target, require=name)
            for work in works(op, call, sizes, device, target.dtype):
                yield measured(op, name, work)


def machine(device: torch.device) -> dict[str, str]:
    """What the numbers were measured on."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or "cpu"
    return {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
