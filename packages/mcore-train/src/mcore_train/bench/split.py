"""Where the time of a step goes, from one profiled step."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from mcore_train.bench.clock import synchronise

Kind = Literal["matmul", "attention", "communication", "memory_bound"]

# Kernels of cuBLAS, CUTLASS and hipBLASLt; those of mcore-kernels for experts; the operators of
# torch that call a matrix library.
_MATMUL = re.compile(
    r"gemm|_matmul_kernel|nvjet|cutlass|xmma|splitk|^cijk|^_?(rows|weight_grad|product)_kernel$"
    r"|^aten::(addmm|mm|bmm|baddbmm|linear)"
)
_ATTENTION = re.compile(r"flash|fmha|sdpa|scaled_dot_product|attention|cudnn_generated")
_MARK = "mcore_train.bench"
_COMMUNICATION = re.compile(r"nccl|^c10d::|gloo:")


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """Seconds of one step by what the device does; together they are the step.

    matmul, attention, memory_bound (norms, activations, rotary positions, losses, casts and
    copies) and communication are those of forward and backward. Communication counts where
    nothing else runs at the same time. optimizer is all from the gradient norm to the new
    parameters, gaps what is left: the device waits for the host.
    """

    matmul: float
    attention: float
    memory_bound: float
    communication: float
    optimizer: float
    gaps: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True, kw_only=True)
class _Interval:
    name: str
    start: float
    stop: float


def classify(name: str) -> Kind:
    """What a kernel (or, on a CPU, an operator of torch) of this name does."""
    lower = name.lower()
    if _COMMUNICATION.search(lower):
        return "communication"
    if _ATTENTION.search(lower):
        return "attention"
    if _MATMUL.search(lower):
        return "matmul"
    return "memory_bound"


def split_step(
    gradients: Callable[[], object],
    update: Callable[[], object],
    device: torch.device,
    *,
    together: Callable[[], object] = lambda: None,
) -> TimeSplit:
    """Run `gradients` under the profiler, then `update` under the clock; return the seconds.

    `together` returns when all ranks have called it: none is then timed while it waits for another
    that is still starting or stopping its profiler. The step is slower than without a profiler:
    look at the shares.
    """
    intervals, wall = _profiled(gradients, device, together)
    together()
    synchronise(device)
    start = time.perf_counter()
    update()
    synchronise(device)
    optimizer = time.perf_counter() - start
    seconds = dict.fromkeys(("matmul", "attention", "memory_bound"), 0.0)
    computing = [one for one in intervals if classify(one.name) != "communication"]
    for one in computing:
        seconds[classify(one.name)] += one.stop - one.start
    busy = _covered(intervals)
    exposed = busy - _covered(computing)
    # Kernels of several streams may overlap: the shares are then those of their sum.
    overlap = _covered(computing) / max(sum(seconds.values()), 1e-12)
    return TimeSplit(
        **{kind: value * overlap for kind, value in seconds.items()},
        communication=exposed,
        optimizer=optimizer,
        gaps=max(wall - busy, 0.0),
    )


def _profiled(
    run: Callable[[], object], device: torch.device, together: Callable[[], object]
) -> tuple[list[_Interval], float]:
    """What ran on the device, in seconds, and the wall time of the whole."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    # Of a CPU other threads are not seen unless asked for: paired forwards have their own.
    threads = None if cuda else _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, acc_events=True, experimental_config=threads) as profiler:
        together()
        synchronise(device)
        start = time.perf_counter()
        with record_function(_MARK):
            run()
        synchronise(device)
        wall = time.perf_counter() - start
    events: list[Any] = list(profiler.events() or ())
    # What came before is the waiting for other ranks.
    begin = min(e.time_range.start for e in events if e.name == _MARK)
    events = [e for e in events if e.time_range.start >= begin]
    if cuda:
        found = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
        return [_interval(e) for e in found], wall
    return list(_own_times(events)), wall


def _interval(event: Any) -> _Interval:
    span = event.time_range
    return _Interval(name=event.name, start=span.start / 1e6, stop=span.end / 1e6)


def _own_times(events: Iterable[Any]) -> Iterable[_Interval]:
    """Operators on a CPU one after another, each with the time that is not another operator's."""
    at = 0.0
    for event in events:
        own = event.self_cpu_time_total / 1e6
        if own > 0 and "::" in event.name:
            yield _Interval(name=event.name, start=at, stop=at + own)
            at += own


def _covered(intervals: Iterable[_Interval]) -> float:
    """Seconds in which at least one of the intervals runs."""
    total, end = 0.0, -float("inf")
    for one in sorted(intervals, key=lambda interval: interval.start):
        total += max(one.stop - max(one.start, end), 0.0)
        end = max(end, one.stop)
    return total
