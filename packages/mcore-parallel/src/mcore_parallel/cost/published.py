"""Training steps that others and we have measured, to hold estimates against.

Of every point the source gives model, GPUs, sizes of the axes and batch. Where it leaves open how
many chunks a stage had, what was recomputed or what overlapped, `assumed` says what is taken here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from mcore_parallel.config import ParallelConfig
from mcore_parallel.cost.architecture import ModelShape
from mcore_parallel.cost.machines import machine
from mcore_parallel.cost.planner import Estimate, estimate
from mcore_parallel.cost.shapes import deepseek_v3_shape, mixtral_shape, shape
from mcore_parallel.cost.work import Precision, Runtime, Workload


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured step. seconds: what the source gives, or follows from what it gives."""

    name: str
    source: str
    shape: ModelShape
    machine: str
    world: int
    layout: str
    work: Workload
    seconds: float
    assumed: str = ""

    def estimate(self) -> Estimate:
        """Return what the model of costs says of it."""
        return estimate(
            self.shape,
            ParallelConfig.parse(self.layout),
            machine(self.machine),
            self.work,
            world=self.world,
        )


def points() -> tuple[Point, ...]:
    """Return all of them, oldest machines first."""
    makers = _korthikanti, _mt_nlg, _llama, _nemotron, _bridge, _deepseek, _ours
    return tuple(point for make in makers for point in make())


def _korthikanti() -> list[Point]:
    """Table 5 of arXiv:2205.05198: step times with sequence parallelism and selective
    recomputation, and with full recomputation and neither."""
    rows = (
        ("gpt-22b", 8, 8, 1, 1, 4, 4, 1.10, 1.42),
        ("gpt-175b", 64, 8, 8, 3, 64, 1, 13.75, 18.13),
        ("gpt-530b", 280, 8, 35, 3, 280, 1, 37.83, 49.05),
        ("gpt-1t", 512, 8, 64, 1, 512, 1, 71.49, 94.42),
    )
    runtime = Runtime(fused_attention=False, dropout=True, scattered_messages=True)
    found = []
    for name, world, tp, pp, chunks, batch, micro, selective, full in rows:
        layout = f"tp={tp} pp={pp} dp=1"
        if chunks > 1:
            layout += f" schedule=interleaved chunks={chunks}"
        work = Workload(
            batch=batch, seq_length=2048, micro_batch=micro, recompute="core_attn", runtime=runtime
        )
        common = partial(
            Point,
            source="Korthikanti et al. 2022, table 5",
            shape=shape(name),
            machine="a100",
            world=world,
        )
        found.append(common(name=name, layout=f"{layout} sp", work=work, seconds=selective))
        again = replace(work, recompute="full")
        found.append(common(name=f"{name}, all again", layout=layout, work=again, seconds=full))
    return found


def _mt_nlg() -> list[Point]:
    """Section 2.4 of arXiv:2201.11990."""
    runtime = Runtime(fused_attention=False, dropout=True, scattered_messages=True)
    work = Workload(batch=1920, seq_length=2048, recompute="full", runtime=runtime)
    return [
        Point(
            name="mt-nlg-530b",
            source="Smith et al. 2022, section 2.4",
            shape=shape("gpt-530b"),
            machine="a100",
            world=8 * nodes,
            layout="tp=8 pp=35 zero=0 overlap=0",
            work=work,
            seconds=seconds,
        )
        for nodes, seconds in ((280, 60.1), (420, 44.4))
    ]


def _llama() -> list[Point]:
    """Table 4 of arXiv:2407.21783, in FLOP/s per GPU.

    Which FLOPs were counted is not said there; here those of `flops_per_token`, causal attention
    once. It matters to the long sequences alone.
    """
    rows = (
        (8192, "cp=1", 8192, 2048, 430e12),
        (16384, "cp=1", 8192, 2048, 400e12),
        (16384, "cp=16 cp-kind=all-gather", 131072, 128, 380e12),
    )
    model = shape("llama-3-405b")
    return [
        Point(
            name=f"llama-3-405b, sequence {length:,}",
            source="Grattafiori et al. 2024, table 4",
            shape=model,
            machine="h100",
            world=world,
            layout=f"tp=8 {cp} pp=16 sp schedule=interleaved chunks=8 count-embedding count-loss",
            work=Workload(batch=batch, seq_length=length, recompute="norm+act"),
            seconds=model.flops_per_token(length) * batch * length / world / rate,
            assumed="8 chunks, norms and activations recomputed",
        )
        for world, cp, length, batch, rate in rows
    ]


def _nemotron() -> list[Point]:
    """Table 2 of arXiv:2406.11704."""
    return [
        Point(
            name="nemotron-4-340b",
            source="Adler et al. 2024, table 2",
            shape=shape("nemotron-4-340b"),
            machine="h100",
            world=6144,
            layout="tp=8 pp=12 sp schedule=interleaved chunks=8",
            work=Workload(batch=2304, seq_length=4096),
            seconds=8.0,
            assumed="8 chunks",
        )
    ]


def _bridge() -> list[Point]:
    """The tables for DGX-H100 of Megatron Bridge's performance summary, in tokens/s of a GPU."""
    runtime = Runtime(tensor_overlap=0.7)
    precision = Precision(format="fp8")
    rows = (
        ("llama-3-8b", "25.11", 8, "zero=3", 128, 14451),
        ("llama-3-70b", "26.02", 64, "tp=4 pp=8 sp schedule=interleaved chunks=5", 256, 1621),
        ("llama-3-405b", "25.11", 1024, _BRIDGE_405B, 512, 292),
        ("llama-3-405b", "26.02", 1024, _BRIDGE_405B, 1536, 311),
    )
    return [
        Point(
            name=f"{name}, fp8, batch {batch:,}",
            source=f"Megatron Bridge performance summary, {release}",
            shape=shape(name),
            machine="h100",
            world=world,
            layout=layout,
            work=Workload(batch=batch, seq_length=8192, precision=precision, runtime=runtime),
            seconds=batch * 8192 / world / rate,
            assumed="tensor parallel collectives 70% overlapped",
        )
        for name, release, world, layout, batch, rate in rows
    ]


_BRIDGE_405B = "tp=8 cp=2 pp=8 sp schedule=interleaved chunks=8 count-embedding count-loss"


def _deepseek() -> list[Point]:
    """DeepSeek-V3: 180 thousand GPU hours for 10^12 tokens (arXiv:2412.19437, section 1), and
    Megatron Bridge's figure for 1,024 GPUs."""
    precision = Precision(format="fp8", optimizer=8.0, dispatch=1.0)
    batch, length, world = 15360, 4096, 2048
    theirs = Point(
        name="deepseek-v3 with prediction",
        source="DeepSeek-AI 2024, section 1",
        shape=deepseek_v3_shape(predictions=1),
        machine="h800",
        world=world,
        layout="pp=16 ep=64 schedule=zb-v chunks=2 count-embedding count-loss",
        work=Workload(
            batch=batch,
            seq_length=length,
            precision=precision,
            recompute="norm+act+up",
            runtime=Runtime(expert_overlap=1.0, dispatch="by-node", communication_share=20 / 132),
        ),
        seconds=180e3 * 3600 / 1e12 * batch * length / world,
        assumed="exchange with experts wholly overlapped (DualPipe), drawn as ZB-V",
    )
    bridge = Point(
        name="deepseek-v3",
        source="Megatron Bridge performance summary, 25.09",
        shape=deepseek_v3_shape(),
        machine="h100",
        world=1024,
        layout="tp=2 pp=8 ep=64 etp=1 sp schedule=interleaved chunks=4 count-embedding count-loss",
        work=Workload(
            batch=8192,
            seq_length=length,
            precision=replace(precision, dispatch=2.0),
            recompute="norm+act+up",
            runtime=Runtime(dispatch="by-node"),
        ),
        seconds=8192 * length / 1024 / 1297,
        assumed="norms, activations and projections up recomputed",
    )
    return [theirs, bridge]


def _ours() -> list[Point]:
    """docs/benchmarks/training-h200.md, in tokens/s of a GPU."""
    rows = (
        ("one GPU", 1, "tp=1", 4, 36719),
        ("data parallel 2", 2, "dp=2", 8, 36788),
        ("tensor parallel 2", 2, "tp=2 sp", 4, 28870),
        ("pipeline 2", 2, "pp=2", 4, 23925),
    )
    llama = shape("llama3-8b-8layers")
    mixtral = mixtral_shape(hidden=4096, layers=2, heads=32, width=14336)
    found = [
        Point(
            name=f"llama3-8b-8layers, {name}",
            source="docs/benchmarks/training-h200.md",
            shape=llama,
            machine="h200",
            world=world,
            layout=layout,
            work=Workload(batch=batch, seq_length=8192),
            seconds=batch * 8192 / world / rate,
        )
        for name, world, layout, batch, rate in rows
    ]
    experts = Point(
        name="two layers of mixtral-8x7b, ep 2",
        source="docs/benchmarks/training-h200.md",
        shape=mixtral,
        machine="h200",
        world=2,
        layout="dp=2 ep=2",
        work=Workload(batch=8, seq_length=8192, runtime=Runtime(grouped=False)),
        seconds=8 * 8192 / 2 / 68677,
    )
    return [*found, experts]
