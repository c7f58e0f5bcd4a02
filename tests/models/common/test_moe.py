"""The mixture-of-experts layer: against plain formulas, over every group that cuts its tokens."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_kernels import KernelConfig, Kernels, Target
from mcore_models import (
    AuxiliaryLosses,
    BuildContext,
    GlobalCounts,
    ModelConfig,
    MoEConfig,
    TokenBatch,
    TokenContext,
    build_model,
    llama,
)
from mcore_models.common import MoE
from mcore_models.common.moe import BALANCE_LOSS
from mcore_parallel import (
    GradientBuckets,
    ParallelConfig,
    ParallelMesh,
    RngKey,
    all_reduce,
    initialise,
    param_specs,
)
from mcore_parallel.layout import gather_all
from mcore_parallel.testing import RankPool

H, E, F, K = 8, 4, 6, 2
MOE = MoEConfig(num_experts=E, top_k=K, expert_ffn_size=F, aux_loss_coefficient=0.1)
CONFIG = llama(vocab_size=31, hidden_size=H, num_layers=2, num_heads=2, init_std=0.4)
CONFIG = replace(CONFIG, moe=MOE)
DOCUMENTS, LENGTH = 2, 8


def changed(**fields: Any) -> ModelConfig:
    return replace(CONFIG, moe=replace(MOE, **fields))


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make(config: ModelConfig, mesh: ParallelMesh) -> MoE:
    """The layer in fp64 with the same weights under every mesh."""
    kernels = Kernels(KernelConfig(), Target.of("cpu"))
    layer = MoE(config, BuildContext(mesh=mesh, kernels=kernels, dtype=torch.float64), 0)
    specs = specs_of(layer, mesh)
    initialise(dict(layer.named_parameters()), specs, RngKey(2))
    return layer


def specs_of(layer: MoE, mesh: ParallelMesh) -> Any:
    sequence_parallel = mesh.config.sequence_parallel
    return param_specs(layer, tp=mesh.tp, sequence_parallel=sequence_parallel, prefix="moe")


def batch_of(mask: Tensor, cu_seqlens: list[int]) -> TokenBatch:
    """Tokens that nobody reads, with this loss mask [T]."""
    nothing = torch.zeros(mask.numel(), dtype=torch.int64)
    bounds = torch.tensor(cu_seqlens, dtype=torch.int32)
    return TokenBatch(
        tokens=nothing, positions=nothing, cu_seqlens=bounds, max_seqlen=LENGTH, loss_mask=mask
    )


def context_of(layer: MoE, batch: TokenBatch, tokens: float) -> TokenContext:
    auxiliary = AuxiliaryLosses(GlobalCounts(tokens=tokens), (BALANCE_LOSS,))
    return TokenContext(batch=batch, auxiliary=auxiliary)


def plain_balance(layer: MoE, hidden: Tensor, mask: Tensor, documents: list[slice]) -> Tensor:
    """Σ valid · E · Σ_e f_e P_e over documents, by its definition."""
    scores = (hidden @ layer.router.weight.t()).softmax(-1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(K).indices, 1.0)
    total = hidden.new_zeros(())
    for rows in documents:
        valid = mask[rows, None]
        count = valid.sum()
        if count:
            f = (chosen[rows] * valid).sum(0) / (K * count)
            p = (scores[rows] * valid).sum(0) / count
            total = total + count * E * (f * p).sum()
    return total


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, E])
def test_output_is_the_weighted_sum_of_the_chosen_experts(top_k: int, normalise: bool) -> None:
    if top_k == 1 and normalise:
        return
    config = changed(top_k=top_k, normalise_top_k=normalise)
    layer = make(config, ParallelMesh.single())
    hidden = random(5, H)
    out = layer(hidden, TokenContext(batch=batch_of(torch.ones(5), [0, 5])))
    gates, ups = layer.experts.get_submodule("gate_up").weight.chunk(2, 1)  # type: ignore[union-attr, operator]
    for token, found in zip(hidden, out, strict=True):
        scores = torch.softmax(layer.router.weight @ token, 0)
        best = scores.argsort(descending=True)[:top_k].tolist()
        want = torch.zeros(H, dtype=torch.float64)
        for e in best:
            inner = torch.nn.functional.silu(gates[e] @ token) * (ups[e] @ token)
            want += scores[e] * (layer.experts.down.weight[e] @ inner)
        if normalise:
            want /= scores[best].sum()
        torch.testing.assert_close(found, want)


def measure(config: ModelConfig, layout: str, mask: Tensor, tokens: float) -> Any:
    """Output of my tokens, the reported balance loss, and all gradients by global name.

    Documents of equal length, cut over cp, then their tokens over tp under sequence parallelism.
    """
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.create(parallel) if dist.is_initialized() else ParallelMesh.single()
    assert mesh is not None
    layer = make(config, mesh)
    specs = specs_of(layer, mesh)
    buckets = GradientBuckets(dict(layer.named_parameters()), specs, mesh)
    buckets.zero()
    cp, length = mesh.cp, LENGTH // mesh.cp.size
    rows = torch.arange(DOCUMENTS * LENGTH).view(DOCUMENTS, cp.size, length)[:, cp.rank].flatten()
    bounds = [i * length for i in range(DOCUMENTS + 1)]
    context = context_of(layer, batch_of(mask[rows], bounds), tokens)
    if parallel.sequence_parallel:
        rows = rows.view(mesh.tp.size, -1)[mesh.tp.rank]
    hidden = random(DOCUMENTS * LENGTH, H)[rows].requires_grad_()
    out = layer(hidden, context)
    # Masked tokens have no loss of their own.
    direction = random(DOCUMENTS * LENGTH, H, seed=1)[rows] * mask[rows, None]
    ((out * direction).sum() / tokens).backward()
    buckets.finish()
    assert context.auxiliary is not None
    share = context.auxiliary.shares()[BALANCE_LOSS]
    value = float(all_reduce(share, mesh.world))
    gradients = gather_all(buckets.gradients(), mesh.world)
    assert hidden.grad is not None
    result = (rows, out.detach(), hidden.grad, value, gradients)
    mesh.close()
    return result


def some_mask() -> Tensor:
    mask = torch.ones(DOCUMENTS * LENGTH, dtype=torch.float64)
    mask[[2, 3, 9, 15]] = 0
    return mask


LAYOUTS = [
    (2, "tp=2"),
    (2, "cp=2"),
    (2, "tp=2,ep=2,etp=1,sp"),
    (4, "tp=2,cp=2"),
    (4, "tp=2,cp=2,ep=2,sp"),
]


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_gradients_do_not_depend_on_what_cuts_the_tokens(
    ranks: RankPool, world: int, layout: str, scope: str
) -> None:
    """U36: the router's gradient, and all others, over tp, cp, ep and sequence parallelism.

    Losses are sums divided by a count that is passed in; there is no other mode.
    """
    config, mask = changed(aux_loss_scope=scope), some_mask()
    count = float(mask.sum())
    _, out, dx, value, gradients = measure(config, "tp=1", mask, count)
    layer = make(config, ParallelMesh.single())
    documents = [slice(0, LENGTH), slice(LENGTH, None)] if scope == "sequence" else [slice(None)]
    hidden = random(DOCUMENTS * LENGTH, H)
    want = 0.1 * plain_balance(layer, hidden, mask, documents).detach() / count
    assert value == pytest.approx(float(want), rel=1e-12)
    found = ranks.run(measure, world, config, layout, mask, count)
    for rows, some_out, some_dx, some_value, _ in found:
        torch.testing.assert_close(some_out, out[rows])
        torch.testing.assert_close(some_dx, dx[rows])
        assert some_value == pytest.approx(value, rel=1e-12)
    assert set(gradients) == {
        "grad/moe.router.weight",
        *(f"grad/moe.experts.{name}.weight" for name in ("gate", "up", "down")),
    }
    for name, wanted in gradients.items():
        torch.testing.assert_close(found[0][4][name], wanted)


def test_the_count_divides_losses_and_nothing_else() -> None:
    """U36: normalising by tokens is the caller's count; with 1 for it gradients are sums."""
    mask = some_mask()
    *_, value, gradients = measure(CONFIG, "tp=1", mask, float(mask.sum()))
    *_, total, sums = measure(CONFIG, "tp=1", mask, 1.0)
    assert total == pytest.approx(value * float(mask.sum()), rel=1e-12)
    for name, wanted in gradients.items():
        torch.testing.assert_close(sums[name] / mask.sum(), wanted)


def balance_gradient(config: ModelConfig, layout: str, mask: Tensor, bounds: list[int]) -> Any:
    """Value and router gradient of the balance loss alone, of the first tokens."""
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.create(parallel) if dist.is_initialized() else ParallelMesh.single()
    assert mesh is not None
    layer = make(config, mesh)
    context = context_of(layer, batch_of(mask, bounds), float(mask.sum()))
    hidden = random(mask.numel(), H)
    if parallel.sequence_parallel:
        hidden = hidden.view(mesh.tp.size, -1, H)[mesh.tp.rank]
    (layer(hidden, context) * 0.0).sum().backward()
    assert layer.router.weight.grad is not None
    assert context.auxiliary is not None
    share = context.auxiliary.shares()[BALANCE_LOSS]
    found = all_reduce(share, mesh.tp), all_reduce(layer.router.weight.grad, mesh.tp)
    mesh.close()
    return found


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_padding_does_not_count(ranks: RankPool, scope: str) -> None:
    """U37: four tokens and four of padding are balanced like the four alone, cut over ranks too.

    Padding inside a document, and documents of padding only.
    """
    config = changed(aux_loss_scope=scope)
    alone = balance_gradient(config, "tp=1", torch.ones(4), [0, 4])
    mask = torch.tensor([1.0] * 4 + [0.0] * 4)
    cases = [([0, 8], mask), ([0, 4, 8], mask)]
    for bounds, padded in cases:
        found = [balance_gradient(config, "tp=1", padded, bounds)]
        for layout in ("tp=2", "tp=2,sp"):
            found += ranks.run(balance_gradient, 2, config, layout, padded, bounds)
        for value, gradient in found:
            torch.testing.assert_close(value, alone[0])
            torch.testing.assert_close(gradient, alone[1])
    assert alone[1].any()


def test_a_batch_without_valid_tokens_has_no_loss() -> None:
    for scope in ("sequence", "micro_batch"):
        config = changed(aux_loss_scope=scope)
        value, gradient = balance_gradient(config, "tp=1", torch.zeros(8), [0, 4, 8])
        assert value == 0
        assert not gradient.any()


def test_documents_are_balanced_alone_whatever_they_are_packed_with() -> None:
    """A batch of documents, or each of them in a micro-batch of its own: the shares add up."""
    layer = make(CONFIG, ParallelMesh.single())
    hidden, bounds = random(12, H), [0, 5, 6, 12]
    direction = random(12, H, seed=3)

    def run(batch: TokenBatch, rows: slice) -> Tensor:
        context = context_of(layer, batch, 12.0)
        (layer(hidden[rows], context) * direction[rows]).sum().div(12.0).backward()
        assert context.auxiliary is not None
        return context.auxiliary.shares()[BALANCE_LOSS]

    whole = run(batch_of(torch.ones(12), bounds), slice(None))
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    parts = [run(batch_of(torch.ones(b - a), [0, b - a]), slice(a, b)) for a, b in pairwise(bounds)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def test_the_coefficient_adds_that_much_of_the_gradient() -> None:
    """U40: with 0.01 for 0 the router's gradient differs by 0.01 · d(balance)/d(router)."""
    mask = some_mask()
    count = float(mask.sum())
    without = measure(changed(aux_loss_coefficient=0.0), "tp=1", mask, count)
    with_it = measure(changed(aux_loss_coefficient=0.01), "tp=1", mask, count)
    assert (without[3], with_it[3] > 0) == (0.0, True)
    layer = make(CONFIG, ParallelMesh.single())
    documents = [slice(0, LENGTH), slice(LENGTH, None)]
    total = plain_balance(layer, random(DOCUMENTS * LENGTH, H), mask, documents) / count
    (gradient,) = torch.autograd.grad(total, layer.router.weight)
    name = "grad/moe.router.weight"
    assert gradient.any()
    torch.testing.assert_close(with_it[4][name] - without[4][name], 0.01 * gradient)
    for other in without[4].keys() - {name}:
        assert torch.equal(with_it[4][other], without[4][other])


def forced(layout: str, empty_rank: int | None) -> Any:
    """Every token of every rank to expert 0; one rank may have none."""
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.create(parallel) if dist.is_initialized() else ParallelMesh.single()
    assert mesh is not None
    layer = make(changed(top_k=1, normalise_top_k=False), mesh)
    with torch.no_grad():
        layer.router.weight[:, 0] = torch.tensor([50.0, 0.0, 0.0, 0.0])
    specs = specs_of(layer, mesh)
    buckets = GradientBuckets(dict(layer.named_parameters()), specs, mesh)
    buckets.zero()
    rows = torch.arange(6)
    if mesh.world.size > 1:
        halves = [rows[:3], rows[3:]] if empty_rank is None else [rows, rows]
        rows = rows[:0] if mesh.rank == empty_rank else halves[mesh.rank]
    hidden = random(6, H)[rows]
    hidden[:, 0] = 1.0
    hidden.requires_grad_()
    batch = batch_of(torch.ones(len(rows)), [0, len(rows)] if len(rows) else [0])
    layer(hidden, TokenContext(batch=batch)).square().sum().backward()
    buckets.finish()
    gradients = gather_all(buckets.gradients(), mesh.world)
    mesh.close()
    return hidden.grad, gradients


@pytest.mark.parametrize("empty_rank", [None, 0, 1])
def test_one_expert_may_get_everything_and_a_rank_nothing(
    ranks: RankPool, empty_rank: int | None
) -> None:
    """U39: idle experts have gradients of zero, everything else is as on one rank."""
    dx, gradients = forced("dp=1", None)
    found = ranks.run(forced, 2, "dp=2,ep=2", empty_rank)
    torch.testing.assert_close(torch.cat([one[0] for one in found]), dx)
    for name, want in gradients.items():
        torch.testing.assert_close(found[0][1][name], want)
        if "experts" in name:
            assert want[0].any()
            assert not found[0][1][name][1:].any()


def test_a_rank_without_tokens_and_documents_is_balanced_too() -> None:
    layer = make(CONFIG, ParallelMesh.single())
    context = context_of(layer, batch_of(torch.ones(0), [0]), 5.0)
    out = layer(torch.zeros(0, H, dtype=torch.float64), context)
    assert out.shape == (0, H)
    out.sum().backward()
    assert context.auxiliary is not None
    assert context.auxiliary.shares()[BALANCE_LOSS] == 0


def test_the_router_keeps_fp32_in_a_16_bit_model() -> None:
    model = build_model(CONFIG, dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    routers = {name for name in dtypes if "router" in name}
    assert len(routers) == 2
    assert {dtypes[name] for name in routers} == {torch.float32}
    assert {dtypes[name] for name in dtypes.keys() - routers} == {torch.bfloat16}
    layer = model.get_submodule("layers.0.moe")
    assert isinstance(layer, MoE)
    hidden = random(6, H).to(torch.bfloat16)
    routing = layer.router(hidden)
    scores = (hidden.double() @ layer.router.weight.double().t()).softmax(-1)
    torch.testing.assert_close(routing.scores.double(), scores, rtol=1e-5, atol=1e-6)
    out = layer(hidden, TokenContext(batch=batch_of(torch.ones(6), [0, 6])))
    assert out.dtype == torch.bfloat16


def test_margin_is_the_least_lead_of_a_choice() -> None:
    layer = make(CONFIG, ParallelMesh.single())
    routing = layer.router(random(5, H))
    chosen = torch.zeros_like(routing.scores).scatter(1, routing.experts, 1.0).bool()
    leads = [
        float((row[mine].min() - row[~mine].max()).detach())
        for row, mine in zip(routing.scores, chosen, strict=True)
    ]
    assert routing.margin() == pytest.approx(min(leads))
    assert make(changed(top_k=E), ParallelMesh.single()).router(random(5, H)).margin() == torch.inf
    assert layer.router(random(0, H)).margin() == torch.inf
