"""Machines: what their GPUs and links can do, and what of it long training runs reach."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way out of a GPU. bandwidth: bytes/s in one direction that large messages reach.

    latency: seconds of one step of a collective.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Matrix products of one number format. peak: dense FLOP/s on paper; reached: the share of it
    that the largest products reach in a long run, under the power limit.
    """

    peak: float
    reached: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A cluster of equal nodes.

    bf16, fp8: rates of matrix products (None: there are none in that format). half_size: the
    dimension at which a product loses half: m x k by k x n reaches the share
    reached · m/(m+half) · k/(k+half) · n/(n+half) of the peak. attention: what share of the bf16
    peak fused causal attention reaches, forward and backward together, masked pairs not counted.
    memory: bytes of a GPU; reserved: what the runtime and communication buffers keep of it.
    memory_bandwidth: bytes/s; streaming: what share of it operations without products reach.
    kernel: seconds between two kernels. intra, inter: links within a node (to all its GPUs
    together) and between nodes (of each GPU).
    """

    name: str
    gpus_per_node: int = 8
    bf16: Rate
    fp8: Rate | None = None
    half_size: float = 128.0
    attention: float
    memory: float
    reserved: float = 3.0 * 2**30
    memory_bandwidth: float
    streaming: float
    kernel: float = 3e-6
    intra: Link
    inter: Link

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node must be at least 1, not {self.gpus_per_node}")

    def rate(self, format: str) -> Rate:
        """Return the rate of a number format; ValueError where the machine has none."""
        found = {"bf16": self.bf16, "fp8": self.fp8}.get(format)
        if found is None:
            has = "bf16" if self.fp8 is None else "bf16 and fp8"
            raise ValueError(f"machine {self.name} has no products in {format!r}: use {has}")
        return found

    def product(self, m: float, k: float, n: float, format: str = "bf16") -> float:
        """Return the seconds of a product m x k by k x n of `format`, written as bf16."""
        if not (m and k and n):
            return 0.0
        half = self.half_size
        reached = m / (m + half) * k / (k + half) * n / (n + half)
        size = 1 if format == "fp8" else 2
        rate = self.rate(format)
        moved = size * (m * k + k * n) + 2 * m * n
        return (
            max(2.0 * m * k * n / (rate.peak * rate.reached * reached), self.stream(moved))
            + self.kernel
        )

    def stream(self, moved: float) -> float:
        """Return the seconds in which operations without products move so many bytes."""
        return moved / (self.memory_bandwidth * self.streaming)


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The links of one group of ranks: its size, and how many of it sit in one node."""

    machine: Machine
    size: int
    per_node: int

    @property
    def inside(self) -> bool:
        """Whether the group lies within a node."""
        return self.size <= self.per_node

    @property
    def bandwidth(self) -> float:
        """Bytes/s of a ring through the group: every GPU of it in a node has a link of its own."""
        intra, inter = self.machine.intra.bandwidth, self.machine.inter.bandwidth
        return intra if self.inside else min(intra, self.per_node * inter)

    @property
    def latency(self) -> float:
        """Seconds that a collective takes at least."""
        link = self.machine.intra if self.inside else self.machine.inter
        return link.latency * math.ceil(math.log2(self.size)) if self.size > 1 else 0.0

    def all_gather(self, total: float) -> float:
        """Return the seconds of an all-gather to `total` bytes, or a reduce-scatter from it."""
        if self.size == 1:
            return 0.0
        return total * (self.size - 1) / self.size / self.bandwidth + self.latency

    def all_reduce(self, total: float) -> float:
        """Return the seconds of an all-reduce of `total` bytes."""
        return 2 * self.all_gather(total)

    def all_to_all(self, sent: float, *, nodes: float | None = None) -> float:
        """Return the seconds of an exchange in which every rank sends `sent` bytes to all alike.

        nodes: how many copies of the bytes of one token leave for other nodes, where a copy for
        each node is forwarded inside it; `sent` is then the bytes without any repetition.
        """
        if self.size == 1:
            return 0.0
        away = (self.size - self.per_node) / self.size if not self.inside else 0.0
        near = (min(self.per_node, self.size) - 1) / self.size
        intra, inter = self.machine.intra.bandwidth, self.machine.inter.bandwidth
        across = sent * away if nodes is None else sent * nodes
        within = sent * near if nodes is None else sent * (nodes + near)
        return max(across / inter, within / intra) + self.latency

    def send(self, size: float) -> float:
        """Return the seconds of a message to the next rank, the slowest of them."""
        link = self.machine.intra if self.inside else self.machine.inter
        return size / link.bandwidth + link.latency


_GB, _TB, _TFLOPS, _GIB = 1e9, 1e12, 1e12, 2.0**30

# Peaks, memory and link rates are the vendors' (dense, one direction); of links 80% are taken as
# reached. The shares are fitted to the points of `published`, see docs/scaling.md.
_H100 = Machine(
    name="h100",
    bf16=Rate(peak=989.4 * _TFLOPS, reached=0.62),
    fp8=Rate(peak=1978.9 * _TFLOPS, reached=0.58),
    attention=0.45,
    memory=80 * _GIB,
    memory_bandwidth=3.35 * _TB,
    streaming=0.65,
    intra=Link(bandwidth=360 * _GB, latency=8e-6),
    inter=Link(bandwidth=40 * _GB, latency=15e-6),
)

MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "a100": Machine(
            name="a100",
            bf16=Rate(peak=312.0 * _TFLOPS, reached=0.80),
            attention=0.45,
            memory=80 * _GIB,
            memory_bandwidth=2.04 * _TB,
            streaming=0.65,
            intra=Link(bandwidth=240 * _GB, latency=8e-6),
            inter=Link(bandwidth=20 * _GB, latency=15e-6),
        ),
        "h100": _H100,
        "h200": replace(
            _H100,
            name="h200",
            bf16=Rate(peak=989.4 * _TFLOPS, reached=0.70),
            memory=140 * _GIB,
            memory_bandwidth=4.8 * _TB,
        ),
        "h800": replace(_H100, name="h800", intra=Link(bandwidth=160 * _GB, latency=8e-6)),
    }
)
"""Machines by name: nodes of eight GPUs, every GPU with a network link of its own."""


def machine(name: str) -> Machine:
    """Return the machine of a name in `MACHINES`; ValueError suggests the nearest."""
    if name not in MACHINES:
        near = difflib.get_close_matches(name.lower(), MACHINES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"machine {name!r}: {hint}known are {', '.join(MACHINES)}")
    return MACHINES[name]
