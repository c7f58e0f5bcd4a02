"""A forward beside another micro-batch's backward: the same results, and messages hidden."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mcore_models import (
    GPT,
    GlobalCounts,
    ModelConfig,
    MoEConfig,
    TokenBatch,
    build_model,
    llama,
)
from mcore_models.common import MoE
from mcore_models.common.moe import take_turns
from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey, run_schedule
from mcore_parallel._torch import default_store
from mcore_parallel.expert import RowOrder, TorchPermute, Turns, make_dispatcher
from mcore_parallel.pipeline import (
    Action,
    Channel,
    DeferredGradients,
    Line,
    OpTimes,
    Schedule,
    make_schedule,
    simulate,
    with_messages,
)
from mcore_parallel.testing import RankPool

MOE = MoEConfig(
    num_experts=4, top_k=2, expert_ffn_size=12, shared_ffn_size=8, z_loss_coefficient=0.01,
    capacity_factor=1.2,
)  # fmt: skip
CONFIG = llama(vocab_size=31, hidden_size=16, num_layers=4, num_heads=4, init_std=0.2)
CONFIG = replace(CONFIG, moe=MOE, pattern=("*E", "*-", ".E", "*E"), dropout=0.1)
COUNT = 4


def batches_of(replica: int, count: int = COUNT) -> list[TokenBatch]:
    generator = torch.Generator().manual_seed(replica)
    made = []
    for i in range(count):
        tokens = torch.randint(31, (2, 8), generator=generator)
        ids = range(2 * (i + count * replica), 2 * (i + count * replica) + 2)
        labels = tokens.roll(-1, 1)
        made.append(TokenBatch.from_samples(tokens, labels=labels, sample_ids=ids))
    return made


def split(paired: bool) -> Schedule:
    """One stage's F, B and W, with pairs or in the same order without."""
    order = [Action("F", 0, 0, 0)]
    for i in range(COUNT):
        order += [Action("F", 0, 0, i + 1, paired=paired)] * (i + 1 < COUNT)
        order += [Action("B", 0, 0, i), Action("W", 0, 0, i)]
    return with_messages([order], Line(num_stages=1))


@dataclass
class Step:
    """A model of this rank and what runs a step of it."""

    mesh: ParallelMesh
    model: GPT
    turns: Turns | None

    def run(self, schedule: Schedule, count: int = COUNT) -> dict[str, Tensor]:
        """Losses and gradients by local name."""
        mesh, model, turns = self.mesh, self.model, self.turns
        counts = GlobalCounts(tokens=100.0)
        auxiliary = model.auxiliary_losses(counts)
        options: Any = {"auxiliary": auxiliary, "rng": RngKey(7)}
        stages: list[Any] = [
            partial(model.stage_forward, chunk=chunk, **options)
            for chunk in range(len(model.chunks))
        ]
        if mesh.is_last_stage:
            stages[-1] = partial(model.loss, counts=counts, **options)
        batches = [
            batch.share(mesh.cp.rank, mesh.cp.size) for batch in batches_of(mesh.dp.rank, count)
        ]
        later = DeferredGradients(model.parameters()) if schedule.splits_backward else None
        losses = run_schedule(
            schedule[mesh.pp.rank],
            stages,
            batches,
            Channel(mesh.pp),
            line=schedule.line,
            weight_gradients=later,
            turns=turns,
        )
        if later is not None:
            later.close()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        shares = auxiliary.shares().items()
        return found | {str(i): loss for i, loss in enumerate(losses)} | dict(shares)


def step_of(parallel: ParallelConfig, config: ModelConfig = CONFIG, **options: Any) -> Step:
    mesh = ParallelMesh.create(parallel)
    assert mesh is not None
    model = build_model(config, mesh, key=RngKey(4), **options)
    turns = take_turns(model) if parallel.overlap_expert_exchange else None
    return Step(mesh, model, turns)


def trained(layout: str, recompute: RecomputeConfig | None, weights: bool) -> dict[str, Tensor]:
    parallel = ParallelConfig.parse(layout)
    step = step_of(parallel, recompute=recompute or RecomputeConfig())
    paired = parallel.overlap_expert_exchange
    schedule = split(paired)
    if not weights:
        schedule = make_schedule(
            parallel.schedule, parallel.pp, COUNT, chunks=parallel.chunks, paired=paired
        )
    assert not paired or any(action.paired for stage in schedule for action in stage)
    found = step.run(schedule)
    step.mesh.close()
    return found


@pytest.mark.parametrize(
    ("world", "layout", "recompute", "weights"),
    [
        (2, "dp=2,ep=2", None, False),
        (2, "dp=2,ep=2", None, True),
        (2, "dp=2,ep=2,dispatch=all-gather", RecomputeConfig(mode="full", first_layers=1), False),
        (2, "tp=2,ep=2,etp=1,sp", RecomputeConfig(mode="selective", parts=("moe", "norm")), False),
        (2, "cp=2,ep=2", RecomputeConfig(mode="full", layers_together=2), True),
        (4, "pp=2,ep=2,schedule=1f1b", None, False),
        (4, "pp=2,ep=2,schedule=interleaved,chunks=2", None, False),
    ],
)
def test_turns_change_nothing(
    ranks: RankPool, world: int, layout: str, recompute: RecomputeConfig | None, weights: bool
) -> None:
    """Losses and gradients bit for bit, with dropout; recomputed, and with W actions."""
    each = ranks.run(trained, world, layout, recompute, weights)
    paired = ranks.run(trained, world, f"{layout},overlap-experts", recompute, weights)
    for want, found in zip(each, paired, strict=True):
        assert found.keys() == want.keys()
        for name, value in found.items():
            assert torch.equal(value, want[name]), name


class Marked(torch.autograd.Function):
    """Something that is computed, and what is to happen in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[], None]) -> Tensor:
        ctx.then = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.then()
        return grad, None


def on_call(module: Any, forward: Callable[[int], None], backward: Callable[[int], None]) -> None:
    """Call `forward(i)` and `backward(i)` in the passes of the i-th call of a module."""
    count = 0

    def hook(module: Any, args: Any) -> Any:
        nonlocal count
        number, count = count, count + 1
        forward(number)
        return Marked.apply(args[0], partial(backward, number)), *args[1:]  # type: ignore[no-untyped-call]

    module.register_forward_pre_hook(hook)


def side_by_side(kind: str, seconds: float) -> dict[str, bool]:
    """Rank 1 holds back messages of one micro-batch until rank 0 computes the other."""
    met: dict[str, bool] = {}
    sends = 0

    def hold(what: str) -> None:
        try:
            default_store().wait([what], datetime.timedelta(seconds=seconds))
        except RuntimeError:  # it took too long
            met[what] = False
        else:
            met[what] = True

    class Late(TorchPermute):
        def permute(self, x: Tensor, order: RowOrder, /) -> Tensor:
            nonlocal sends
            if order.places.shape[1] > 1:  # of the tokens on their way to experts
                sends += 1
                if sends == 2 and step.mesh.rank == 1:
                    hold("gradients of the first")
            return super().permute(x, order)

        def unpermute(self, rows: Tensor, weights: Tensor | None, order: RowOrder, /) -> Tensor:
            out = super().unpermute(rows, weights, order)
            if weights is None or sends != 1 or step.mesh.rank == 0:
                return out
            then = partial(hold, "attention of the second")
            return Marked.apply(out, then)  # type: ignore[no-untyped-call]

    def tell(what: str, wanted: int, number: int) -> None:
        if (step.mesh.rank, number) == (0, wanted):
            default_store().set(what, "1")

    def nothing(number: int) -> None: ...

    config = replace(
        CONFIG, num_layers=1, pattern=("*E",), dropout=0.0, moe=replace(MOE, shared_ffn_size=0)
    )
    parallel = ParallelConfig(dp=2, ep=2, overlap_expert_exchange=kind == "paired")
    step = step_of(parallel, config, builders={"E": partial(MoE, permute=Late())})
    layer: Any = step.model.layers["0"]
    on_call(layer.attention, partial(tell, "attention of the second", 1), nothing)
    on_call(layer.moe.experts, nothing, partial(tell, "gradients of the first", 0))
    paired = kind == "paired"
    step.run(make_schedule("1f1b" if paired else kind, 1, 2, paired=paired), 2)
    step.mesh.close()
    return met


@pytest.mark.parametrize(
    ("kind", "met"), [("paired", (True, True)), ("1f1b", (False, True)), ("gpipe", (True, False))]
)
def test_one_micro_batch_computes_while_messages_of_another_travel(
    ranks: RankPool, kind: str, met: tuple[bool, bool]
) -> None:
    """The second's forward beside gradients of the first, and the other way round; not in turn,
    a rank computes the second only when the first is back, or the other way round."""
    found = ranks.run(side_by_side, 2, kind, 30.0 if all(met) else 0.4)
    assert found[0] == {}
    assert (found[1]["attention of the second"], found[1]["gradients of the first"]) == met


class Clock:
    """What a rank computes takes the time that is said, and so do its messages."""

    def __init__(self) -> None:
        self.now = 0.0

    def compute(self, seconds: float, number: int) -> None:
        self.now += seconds


class Trip:
    """Rows that take `LATENCY` from where they start to where they are waited for."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.left = clock, 0.0

    def start(self) -> None:
        self.left = self.clock.now

    def end(self) -> None:
        self.clock.now = max(self.clock.now, self.left + LATENCY)

    def leaves(self, x: Tensor) -> Tensor:
        self.start()
        return cast(Tensor, Marked.apply(x, self.end))  # type: ignore[no-untyped-call]

    def arrives(self, x: Tensor) -> Tensor:
        self.end()
        return cast(Tensor, Marked.apply(x, self.start))  # type: ignore[no-untyped-call]


LATENCY = 1.0
"""Of a message, beside 1 for a forward and 2 for a backward of attention or of experts."""


class Far:
    """A dispatcher over a network that takes its time, by the clock."""

    def __init__(self, clock: Clock, num_experts: int, /, **options: Any) -> None:
        self._clock = clock
        self._near = make_dispatcher("all-to-all", num_experts, **options)

    def __call__(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Any:
        there, back = Trip(self._clock), Trip(self._clock)
        sent = self._near(there.leaves(tokens), experts, weights)

        def wait() -> Any:
            arrived = sent.wait()

            def combine(outputs: Tensor) -> Any:
                returning = arrived.combine(back.leaves(outputs))
                return SimpleNamespace(wait=lambda: back.arrives(returning.wait()))

            rows = there.arrives(arrived.rows)
            return SimpleNamespace(rows=rows, counts=arrived.counts, combine=combine)

        return SimpleNamespace(wait=wait)


def test_a_step_takes_as_long_as_the_simulator_says() -> None:
    """The time of messages is hidden in all pairs, and in nothing else."""
    layers, took = 3, []
    config = replace(CONFIG, num_layers=layers, pattern=("*E",) * layers, dropout=0.0)
    for paired in (False, True):
        clock = Clock()
        experts = partial(MoE, dispatcher=partial(Far, clock))
        model = build_model(config, ParallelMesh.single(), key=RngKey(4), builders={"E": experts})
        turns = take_turns(model)
        assert take_turns(model) is turns
        for layer in cast(Any, model.layers.values()):
            for part in (layer.attention, layer.moe.experts):
                on_call(part, partial(clock.compute, 1.0), partial(clock.compute, 2.0))
        schedule = make_schedule("1f1b", 1, COUNT, paired=paired)
        Step(ParallelMesh.single(), model, turns).run(schedule)
        exchange = 2 * LATENCY * layers
        times = OpTimes(
            forward=2 * layers + exchange, backward=4 * layers + exchange, exchange=exchange
        )
        assert clock.now == simulate(schedule, times).makespan
        took.append(clock.now)
    assert took == [10 * layers * COUNT, 6 * layers * COUNT + 4 * layers]
