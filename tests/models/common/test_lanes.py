"""Parts of a micro-batch side by side: the same results, and messages beside computation."""

import datetime
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_models import (
    GlobalCounts,
    ModelConfig,
    MoEConfig,
    TokenBatch,
    build_model,
    llama,
)
from mcore_models.common import MoE
from mcore_models.common.context import TokenContext
from mcore_models.common.lanes import split_lanes
from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey
from mcore_parallel._torch import default_store
from mcore_parallel.expert import RowOrder, TorchPermute, finish, in_turns
from mcore_parallel.testing import RankPool

MOE = MoEConfig(
    num_experts=4, top_k=2, expert_ffn_size=12, shared_ffn_size=8, z_loss_coefficient=0.01,
    capacity_factor=1.2,
)  # fmt: skip
CONFIG = llama(vocab_size=31, hidden_size=16, num_layers=3, num_heads=4, init_std=0.2)
CONFIG = replace(CONFIG, moe=MOE, pattern=("*E", "*-", ".E"), dropout=0.1)


def test_computations_take_turns() -> None:
    seen: list[str] = []

    def part(name: str, yields: int) -> Any:
        for step in range(yields):
            seen.append(f"{name}{step}")
            yield
        seen.append(name)
        return len(name) + yields

    assert in_turns([part("a", 2), part("b", 0), part("c", 1)]) == [3, 1, 2]
    assert seen == ["a0", "b", "c0", "a1", "c", "a"]
    assert finish(part("d", 3)) == 4
    assert in_turns([]) == []


def test_lanes_of_a_share_know_how_long_their_documents_are() -> None:
    """Documents of 3, 9, 1 and 3 tokens were filled up; two go into each lane."""
    whole = TokenBatch.from_samples(
        torch.zeros(1, 16, dtype=torch.int64), cu_seqlens=torch.tensor([0, 3, 12, 13, 16])
    )
    share = whole.share(0, 2)
    assert share.lengths == (3, 9, 1, 3)
    parts = split_lanes(TokenContext(batch=share), 2)
    assert [context.batch.lengths for context, _ in parts] == [(3, 9), (1, 3)]
    even = TokenBatch.from_samples(torch.zeros(2, 8, dtype=torch.int64)).share(0, 2)
    assert even.lengths is None


def batch_of(rank: int, packed: bool) -> TokenBatch:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(31, (4, 6), generator=generator)
    # Few documents, of which the last ends before the tokens do where there are shares.
    places = [0, 5, 7, 24] if rank == 0 else [0, 24]
    bounds = torch.tensor(places, dtype=torch.int32) if packed else None
    mask = torch.ones(4, 6)
    mask[1, 2:] = 0
    return TokenBatch.from_samples(
        tokens,
        labels=tokens.roll(-1, 1),
        loss_mask=mask,
        cu_seqlens=bounds,
        sample_ids=range(4 * rank, 4 * rank + 4),
    )


@pytest.mark.parametrize(("packed", "lanes"), [(False, 2), (False, 3), (True, 2), (True, 5)])
def test_lanes_are_whole_documents(packed: bool, lanes: int) -> None:
    batch = batch_of(0, packed)
    parts = split_lanes(TokenContext(batch=batch), lanes)
    assert len(parts) == lanes
    rows = [row for _, part in parts for row in range(24)[part]]
    assert rows == list(range(24))
    for context, part in parts:
        assert context.in_turns
        mine = context.batch
        assert torch.equal(mine.tokens, batch.tokens[part])
        assert torch.equal(mine.positions, batch.positions[part])
        assert mine.loss_mask is not None
        assert batch.loss_mask is not None
        assert torch.equal(mine.loss_mask, batch.loss_mask[part])
        documents = batch.documents()[part]
        assert mine.num_documents == documents.unique().numel()
        if len(documents):
            assert torch.equal(mine.documents(), documents - documents[0])
            assert mine.max_seqlen == documents.bincount().max()
    sizes = [context.batch.num_documents for context, _ in parts]
    assert max(sizes) - min(sizes) <= 1
    unnamed = split_lanes(TokenContext(batch=replace(batch, rows=None)), lanes)
    rows = [row for context, _ in unnamed for row in none_is_missing(context.batch.rows).tolist()]
    assert rows == list(range(24))  # tokens without numbers have those of their places


def none_is_missing(rows: Tensor | None) -> Tensor:
    assert rows is not None
    return rows


def trained(
    config: ModelConfig, layout: str, packed: bool, recompute: RecomputeConfig | None = None
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients by local name and auxiliary losses, of a batch of this rank."""
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.single()
    if dist.is_initialized():
        made = ParallelMesh.create(parallel)
        assert made is not None
        mesh = made
    model = build_model(
        config, mesh, key=RngKey(4), dtype=torch.float64, recompute=recompute or RecomputeConfig()
    )
    counts = GlobalCounts(tokens=40.0)
    auxiliary = model.auxiliary_losses(counts)
    batch = batch_of(mesh.dp.rank, packed).share(mesh.cp.rank, mesh.cp.size)
    loss = model.loss(batch, counts=counts, auxiliary=auxiliary, rng=RngKey(7))
    loss.backward()
    mesh.close()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients, {n: float(v) for n, v in auxiliary.shares().items()}


@pytest.mark.parametrize(
    ("world", "layout", "packed", "recompute"),
    [
        (2, "dp=2,ep=2", False, None),
        (2, "dp=2,ep=2", True, RecomputeConfig(mode="selective")),
        (2, "dp=2,ep=2,dispatch=all-gather", False, RecomputeConfig(mode="full", first_layers=1)),
        (2, "tp=2,ep=2,etp=1", True, None),
        (2, "cp=2,ep=2", False, RecomputeConfig(mode="selective", parts=("moe", "norm"))),
    ],
)
def test_lanes_change_nothing(
    ranks: RankPool,
    world: int,
    layout: str,
    packed: bool,
    recompute: RecomputeConfig | None,
) -> None:
    """Losses, dropout and gradients, summed over ranks; with five lanes some are empty."""
    want = total(ranks.run(trained, world, CONFIG, layout, packed, recompute))
    for lanes in (2, 5):
        each = ranks.run(trained, world, CONFIG, f"{layout},lanes={lanes}", packed, recompute)
        found = total(each)
        assert found.keys() == want.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, want[name], msg=f"{name}, {lanes} lanes")


def test_what_is_run_again_reaches_ranks_whose_lane_is_empty(ranks: RankPool) -> None:
    """A second run ends on all of them after the same messages, whatever layers follow."""
    moe = MoEConfig(num_experts=4, top_k=2, expert_ffn_size=12, aux_loss_coefficient=0.0)
    config = replace(CONFIG, moe=moe)
    layout = "dp=2,ep=2,dispatch=all-gather,lanes=2"
    together = RecomputeConfig(mode="full", layers_together=2)
    want = total(ranks.run(trained, 2, config, layout, True))
    found = total(ranks.run(trained, 2, config, layout, True, together))
    assert found.keys() == want.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, want[name], msg=name)


def total(found: list[Any]) -> dict[str, Tensor]:
    """The sum over ranks of everything: which tokens a rank routes depends on the lanes."""
    sums: dict[str, Tensor] = {}
    for loss, gradients, losses in found:
        values = {"loss": loss, **losses, **gradients}
        for name, value in values.items():
            sums[name] = sums.get(name, torch.zeros(())) + value
    return sums


class Marked(torch.autograd.Function):
    """Rows of an expert layer, whose backward pass is told of, or held back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, backward: Callable[[], None]) -> Tensor:
        ctx.then = backward
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.then()
        return grad, None


def side_by_side(layout: str, seconds: float) -> dict[str, bool]:
    """Rank 1 holds back messages of one lane until rank 0 computes the other."""
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    met: dict[str, bool] = {}
    calls = {"attention": 0, "experts": 0}

    def tell(what: str) -> None:
        default_store().set(what, "1")

    def hold(what: str) -> None:
        try:
            default_store().wait([what], datetime.timedelta(seconds=seconds))
        except RuntimeError:  # it took too long
            met[what] = False
        else:
            met[what] = True

    class Late(TorchPermute):
        def permute(self, x: Tensor, order: RowOrder, /) -> Tensor:
            if mesh.rank == 1 and "attention of the second" not in met:  # rows of the first lane
                hold("attention of the second")
            return super().permute(x, order)

    def mark_attention(module: Any, args: Any) -> None:
        calls["attention"] += 1
        if calls["attention"] == 2:
            tell("attention of the second")

    def mark_experts(module: Any, args: Any) -> Any:
        calls["experts"] += 1
        if (mesh.rank, calls["experts"]) == (0, 1):
            then = partial(tell, "gradients of the first")
        elif (mesh.rank, calls["experts"]) == (1, 2):
            then = partial(hold, "gradients of the first")
        else:
            return None
        return Marked.apply(args[0], then), args[1]  # type: ignore[no-untyped-call]

    config = replace(
        CONFIG, num_layers=1, pattern=("*E",), dropout=0.0, moe=replace(MOE, shared_ffn_size=0)
    )
    builders: Any = {"E": partial(MoE, permute=Late())}
    model = build_model(config, mesh, key=RngKey(4), builders=builders)
    layer: Any = model.layers["0"]
    if mesh.rank == 0:
        layer.attention.register_forward_pre_hook(mark_attention)
    layer.moe.experts.register_forward_pre_hook(mark_experts)
    batch = batch_of(mesh.rank, False)
    model.loss(batch, counts=GlobalCounts(tokens=40.0)).backward()
    mesh.close()
    return met


@pytest.mark.parametrize("overlap", [True, False])
def test_one_lane_computes_while_messages_of_the_other_travel(
    ranks: RankPool, overlap: bool
) -> None:
    """Forward and backward; without overlap rank 0 waits for what rank 1 holds back."""
    layout = f"dp=2,ep=2,lanes=2,overlap={int(overlap)}"
    found = ranks.run(side_by_side, 2, layout, 30.0 if overlap else 0.4)
    assert found[1] == {"attention of the second": overlap, "gradients of the first": overlap}


def test_what_lanes_cannot_be_combined_with() -> None:
    assert ParallelConfig.parse("dp=2,ep=2,lanes=2").describe().endswith("lanes=2")
    with pytest.raises(ValueError, match="lanes = 2 with sequence parallelism, which cuts"):
        ParallelConfig.parse("tp=2,sp,lanes=2")
    with pytest.raises(ValueError, match="lanes = 2 with sharding parameters, which are whole"):
        ParallelConfig.parse("dp=2,zero=3,lanes=2")
    with pytest.raises(ValueError, match="lanes must be a whole number of at least 1, not 0"):
        ParallelConfig(lanes=0)
