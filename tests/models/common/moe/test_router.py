"""What routers choose and how they weigh it: against transformers and against plain formulas."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_kernels import KernelConfig, Kernels, Target
from mcore_models import BuildContext, ModelConfig, MoEConfig, TokenContext
from mcore_models.common import MoE
from mcore_models.common.moe import Router, RouterRecord, recorded, replayed
from mcore_models.common.moe.choice import scores_of
from mcore_models.parts import ScoreFunction
from mcore_parallel import ParallelMesh, RngKey, counter_uniform

sys.path.append(str(Path(__file__).parent))
from moe_layers import (
    CONFIG,
    E,
    H,
    K,
    batch_of,
    changed,
    context_of,
    make,
    plain_expert,
    random,
)


def run(layer: MoE, hidden: Tensor, key: RngKey | None = None) -> Tensor:
    size = len(hidden)
    batch = batch_of(torch.ones(size), [0, size])
    out: Tensor = layer(hidden, TokenContext(batch=batch, rng=key))
    return out


def same_weights(layer: MoE, pairs: dict[str, nn.Parameter]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for name, theirs in pairs.items():
        mine = layer.get_parameter(name)
        with torch.no_grad():
            theirs.copy_(mine)
        found.append((mine, theirs))
    return found


def close(found: Tensor | None, want: Tensor | None) -> None:
    """Theirs scores in float32."""
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def check_block(layer: MoE, theirs: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> None:
    hidden = random(2, 7, H).requires_grad_()
    other = hidden.detach().clone().requires_grad_()
    found, want = run(layer, hidden.flatten(0, 1)).view(2, 7, H), theirs(other)
    close(found, want)
    direction = random(2, 7, H, seed=5)
    (found * direction).sum().backward()
    (want * direction).sum().backward()
    close(hidden.grad, other.grad)
    for mine, other in pairs:
        close(mine.grad, other.grad)


@pytest.mark.parametrize("normalise", [True, False])
def test_groups_and_corrections_are_those_of_deepseek(normalise: bool) -> None:
    """Sigmoid scores, two best of a group, chosen by corrected and weighed by plain scores."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = changed(
        num_experts=8, top_k=3, score_function="sigmoid", normalise_top_k=normalise,
        scaling_factor=2.5, num_groups=4, top_groups=2, group_score_experts=2,
        correction_rate=0.001, shared_ffn_size=12,
    )  # fmt: skip
    theirs = modeling.DeepseekV3MoE(
        modeling.DeepseekV3Config(
            hidden_size=H, moe_intermediate_size=6, n_routed_experts=8, num_experts_per_tok=3,
            n_group=4, topk_group=2, norm_topk_prob=normalise, routed_scaling_factor=2.5,
            n_shared_experts=2,
        )
    ).double()  # fmt: skip
    layer = make(config)
    pairs = same_weights(
        layer,
        {
            "router.weight": theirs.gate.weight,
            "experts.gate_up.weight": theirs.experts.gate_up_proj,
            "experts.down.weight": theirs.experts.down_proj,
            "shared.down.weight": theirs.shared_experts.down_proj.weight,
        },
    )
    gate, up = layer.get_parameter("shared.gate_up.weight").chunk(2)
    with torch.no_grad():
        theirs.shared_experts.gate_proj.weight.copy_(gate)
        theirs.shared_experts.up_proj.weight.copy_(up)
        # Corrections that stay on one side: theirs ranks experts of other groups as 0.
        layer.router.correction += 0.1  # type: ignore[operator]
        theirs.gate.e_score_correction_bias.copy_(layer.router.correction)
    check_block(layer, theirs, pairs)


def test_shared_experts_with_a_gate_are_those_of_qwen() -> None:
    modeling = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    config = changed(normalise_top_k=False, shared_ffn_size=10, shared_gate=True)
    theirs = modeling.Qwen2MoeSparseMoeBlock(
        modeling.Qwen2MoeConfig(
            hidden_size=H, num_experts=E, num_experts_per_tok=K, moe_intermediate_size=6,
            shared_expert_intermediate_size=10, norm_topk_prob=False,
        )
    ).double()  # fmt: skip
    layer = make(config)
    pairs = same_weights(
        layer,
        {
            "router.weight": theirs.gate.weight,
            "experts.gate_up.weight": theirs.experts.gate_up_proj,
            "experts.down.weight": theirs.experts.down_proj,
            "shared.down.weight": theirs.shared_expert.down_proj.weight,
            "shared_gate.weight": theirs.shared_expert_gate.weight,
        },
    )
    gate, up = layer.get_parameter("shared.gate_up.weight").chunk(2)
    with torch.no_grad():
        theirs.shared_expert.gate_proj.weight.copy_(gate)
        theirs.shared_expert.up_proj.weight.copy_(up)
    check_block(layer, theirs, pairs)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrt_softplus"])
def test_every_score_with_a_bias_by_plain_arithmetic(function: str, normalise: bool) -> None:
    config = changed(
        score_function=function, normalise_top_k=normalise, router_bias=True, scaling_factor=0.5
    )
    layer, hidden = make(config), random(5, H)
    found = run(layer, hidden)
    assert layer.router.bias is not None
    assert layer.router.bias.requires_grad
    for token, out in zip(hidden, found, strict=True):
        logits = (layer.router.weight @ token + layer.router.bias).tolist()
        exp = torch.tensor(logits, dtype=torch.float64).exp()
        scores = {"softmax": exp / exp.sum(), "sigmoid": exp / (1 + exp)}.get(
            function, (1 + exp).log().sqrt()
        )
        best = sorted(range(E), key=lambda e: -logits[e])[:K]
        total = scores[best].sum() if normalise else 1.0
        want = sum(scores[e] / total * 0.5 * plain_expert(layer, e, token) for e in best)
        torch.testing.assert_close(out, want)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrt_softplus"])
def test_a_score_that_vanishes_has_no_gradient(function: ScoreFunction) -> None:
    logits = torch.tensor([[1.0, 0.5, -200.0]], requires_grad=True)
    scores_of(logits, function).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2] == 0


def test_the_best_experts_of_the_best_groups() -> None:
    """One best score makes a group; the margin knows of groups, and of experts within them."""
    config = changed(num_experts=6, num_groups=3, top_groups=1, top_k=2)
    layer, hidden = make(config), random(20, H)
    routing = layer.router(hidden)
    margins = []
    for scores, experts in zip(routing.scores.tolist(), routing.experts.tolist(), strict=True):
        tops = [max(scores[0:2]), max(scores[2:4]), max(scores[4:6])]
        group = tops.index(max(tops))
        assert sorted(experts) == [2 * group, 2 * group + 1]
        margins.append(sorted(tops)[-1] - sorted(tops)[-2])
    assert routing.margin() == pytest.approx(min(margins))


def test_sinkhorn_deals_tokens_out_evenly() -> None:
    """In training, over valid tokens; otherwise the best are chosen."""
    layer = make(changed(expert_choice="sinkhorn", top_k=1, normalise_top_k=False))
    hidden = random(40, H) + 3 * layer.router.weight[1].detach()  # one expert is liked best
    mask = torch.ones(48)
    mask[40:] = 0
    batch = batch_of(mask, [0, 48])
    hidden = torch.cat([hidden, -hidden[:8]])  # padding likes the others

    def counts() -> list[int]:
        chosen: list[Tensor] = []
        hook = layer.router.register_forward_hook(lambda m, a, out: chosen.append(out.experts))
        layer(hidden, TokenContext(batch=batch))
        hook.remove()
        return chosen[0][:40].flatten().bincount(minlength=E).tolist()

    even, plain = counts(), (layer.eval(), counts())[1]
    assert max(even) <= 14
    assert min(even) >= 6
    assert plain[1] >= 30
    # The same as scaling rows and columns in turn until both add up.
    logits = (hidden[:40] @ layer.router.weight.t()).detach()
    matrix = logits.exp()
    for _ in range(200):
        matrix = matrix / matrix.sum(0, keepdim=True)
        matrix = matrix / matrix.sum(1, keepdim=True)
    assert matrix.argmax(-1).bincount(minlength=E).tolist() == even


def test_balanced_choices_go_round_whatever_the_scores() -> None:
    layer = make(changed(expert_choice="balanced"))
    batch = batch_of(torch.ones(6), [0, 6], rows=torch.tensor([0, 1, 2, 3, 9, 11]))
    chosen: list[Any] = []
    layer.router.register_forward_hook(lambda module, args, out: chosen.append(out))
    layer(random(6, H), TokenContext(batch=batch))
    want = [[0, 1], [2, 3], [0, 1], [2, 3], [2, 3], [2, 3]]
    assert chosen[0].experts.tolist() == want
    torch.testing.assert_close(chosen[0].weights.sum(-1), torch.ones(6, dtype=torch.float64))
    assert chosen[0].margin() == torch.inf


def test_jitter_multiplies_what_the_router_sees_in_training() -> None:
    layer, hidden = make(changed(jitter=0.3)), random(7, H)
    plain, key = run(make(CONFIG), hidden), RngKey(11)
    found = run(layer, hidden, key)
    assert torch.equal(found, run(layer, hidden, key))
    assert not torch.equal(found, run(layer, hidden, RngKey(12)))
    index = torch.arange(7 * H).view(7, H)
    noise = 1 + 0.3 * (2 * counter_uniform(key.fold("jitter", 0), index).double() - 1)
    assert 0.7 <= float(noise.min()) < 0.8 < 1.2 < float(noise.max()) <= 1.3
    routing = layer.router(hidden * noise)
    want = [
        sum(w * plain_expert(layer, e, x) for e, w in zip(es.tolist(), ws, strict=True))
        for x, es, ws in zip(hidden, routing.experts, routing.weights, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(want))  # type: ignore[arg-type]
    assert torch.equal(run(layer.eval(), hidden), plain)
    with pytest.raises(ValueError, match=r"jitter=0.3 in training mode needs rng=RngKey"):
        run(layer.train(), hidden)


def test_recorded_choices_are_used_again() -> None:
    """By other weights, in another order and in parts; weighed by the scores they have now."""
    old, new = make(CONFIG), make(CONFIG)
    with torch.no_grad():
        new.router.weight += 0.5 * random(E, H, seed=7)
    hidden, rows = random(12, H), torch.arange(12) * 5 + 3
    batch = batch_of(torch.ones(12), [0, 12], rows=rows)
    with recorded(old) as record:
        old(hidden, TokenContext(batch=batch))
    assert old.router.replay is None
    assert record.layers == (0,)
    chosen = old.router(hidden).experts
    assert not torch.equal(chosen, new.router(hidden).experts)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    for part in (order[:5], order[5:]):
        some = batch_of(torch.ones(len(part)), [0, len(part)], rows=rows[part])
        with replayed(new, record):
            found = new(hidden[part], TokenContext(batch=some))
        logits = hidden[part] @ new.router.weight.t()
        weights = logits.gather(1, chosen[part]).softmax(-1)
        want = [
            sum(w * plain_expert(new, e, x) for e, w in zip(es.tolist(), ws, strict=True))
            for x, es, ws in zip(hidden[part], chosen[part], weights, strict=True)
        ]
        torch.testing.assert_close(found, torch.stack(want))  # type: ignore[arg-type]
    rows = torch.where(rows == 8, 4, rows)
    context = context_of(CONFIG, batch_of(torch.ones(12), [0, 12], rows=rows), 1.0)
    message = r"no choice of 1 of 12 tokens in layer 0, first of row 4"
    with replayed(new, record), pytest.raises(ValueError, match=message):
        new(hidden, context)
    with pytest.raises(ValueError, match=r"no choices of layer 3: it has \(0,\)"):
        record.find(3, rows)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 3}, r"choices of 2 experts for each of 12 tokens, and chooses 3 for each of 12"),
        ({"num_experts": 2}, r"a choice of expert 3, and has 2 experts: 0 to 1"),
    ],
)
def test_choices_that_a_router_cannot_make_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    record, batch = RouterRecord(), batch_of(torch.ones(12), [0, 12])
    record.add(0, torch.arange(12), torch.tensor([[3, 0]]).repeat(12, 1))
    layer = make(changed(**fields))
    with replayed(layer, record), pytest.raises(ValueError, match=message):
        layer(random(12, H), TokenContext(batch=batch))


def test_of_tokens_with_one_number_the_real_one_is_recorded() -> None:
    """Padding has the number 0, like the first token of all."""
    record = RouterRecord()
    record.add(2, torch.tensor([0, 7]), torch.tensor([[1, 2], [3, 0]]), torch.tensor([0.0, 1.0]))
    record.add(2, torch.tensor([4, 0]), torch.tensor([[2, 1], [0, 3]]), torch.tensor([1.0, 1.0]))
    assert record.find(2, torch.tensor([7, 0, 4])).tolist() == [[3, 0], [0, 3], [2, 1]]


def test_experts_may_work_at_another_width() -> None:
    layer, hidden = make(changed(latent_size=4)), random(5, H)
    found, routing = run(layer, hidden), layer.router(hidden)
    assert layer.experts.down.weight.shape == (E, 4, 6)
    want = [
        sum(w * plain_expert(layer, e, layer.latent_down.weight @ x)
            for e, w in zip(es.tolist(), ws, strict=True))
        for x, es, ws in zip(hidden, routing.experts, routing.weights, strict=True)
    ]  # fmt: skip
    torch.testing.assert_close(found, torch.stack(want) @ layer.latent_up.weight.t())  # type: ignore[arg-type]


def test_a_dispatcher_of_ones_own() -> None:
    """Passed in, it is asked in place of the mesh's; its outputs are taken as they are."""

    class Nothing:
        def __init__(self, num_experts: int, **options: Any) -> None:
            assert num_experts == E
            assert set(options) == {"ep", "etp", "permute", "overlap"}

        def __call__(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> "Nothing":
            self.tokens = tokens
            return self

        def wait(self) -> Any:
            return self.tokens.mul(2) if hasattr(self, "rows") else self._arrive()

        def _arrive(self) -> "Nothing":
            self.rows, self.counts = self.tokens[:0], (0,) * E
            return self

        def combine(self, outputs: Tensor) -> "Nothing":
            assert outputs.shape == (0, H)
            return self

    layer = make(CONFIG, dispatcher=Nothing)
    hidden = random(3, H)
    assert torch.equal(run(layer, hidden), 2 * hidden)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score_function": "softmin"}, "score_function='softmin' is none of.*did you mean 'softm"),
        ({"num_groups": 3}, "num_experts=4 cannot be divided into num_groups=3: use .*2 or 4"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups=3 exceeds num_groups=2: use 2 or less"),
        ({"num_groups": 4, "top_groups": 1}, "top_k=2 exceeds the 1 experts of top_groups=1"),
        ({"num_groups": 2, "group_score_experts": 3}, "group_score_experts=3 .* 2 experts: use 1"),
        ({"aux_loss_scope": ("global", "sequence")}, "names global, sequence and .* has 1 values"),
        ({"aux_loss_scope": (), "aux_loss_coefficient": ()}, "names nothing and .* has 0 values"),
        ({"aux_loss_coefficient": -1.0}, "aux_loss_coefficient=-1.0 must be at least 0"),
        ({"z_loss_coefficient": float("nan")}, "z_loss_coefficient=nan must be at least 0"),
        ({"aux_loss_scope": "batch"}, "aux_loss_scope='batch' is none of sequence, micro_batch"),
        ({"shared_gate": True}, "shared_gate without shared experts: give shared_ffn_size"),
        ({"shared_ffn_size": -1}, "shared_ffn_size=-1 must be a whole number"),
        ({"latent_size": 0}, "latent_size=0 must be a whole number"),
        ({"pad_to_capacity": True}, "pad_to_capacity without a capacity: give capacity_factor"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 must be greater than 0"),
        ({"scaling_factor": -2.0}, "scaling_factor=-2.0 must be greater than 0"),
        ({"correction_rate": -0.1}, "correction_rate=-0.1 must be at least 0"),
        ({"jitter": 1.0}, "jitter=1.0 must be at least 0 and less than 1"),
        ({"expert_choice": "balanced", "num_groups": 2}, "looks at no score: leave out num_group"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(num_experts=4, top_k=2, expert_ffn_size=6, **fields)


def test_routers_keep_what_they_learn_in_fp32() -> None:
    config: ModelConfig = changed(correction_rate=0.1, aux_loss_scope="global", router_bias=True)
    kernels = Kernels(KernelConfig(), Target.of("cpu"))
    context = BuildContext(mesh=ParallelMesh.single(), kernels=kernels, dtype=torch.bfloat16)
    router = Router(config, config.moe, context, 0)  # type: ignore[arg-type]
    assert {p.dtype for p in router.parameters()} == {torch.float32}
    assert {n for n, p in router.named_parameters() if not p.requires_grad} == {
        "correction",
        "load",
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalise_top_k": False, "scaling_factor": 2.5},
        {"score_function": "sigmoid", "num_groups": 2, "top_groups": 1, "correction_rate": 0.1},
    ],
    ids=["softmax", "before", "groups"],
)
def test_the_kernel_that_was_chosen_routes(options: dict[str, Any]) -> None:
    """And makes what the router makes by itself, where choices are recorded; bit for bit."""
    layer = make(changed(**options), ParallelMesh.single())
    router, hidden, calls = layer.router, random(9, H), []
    if router.correction is not None:
        router.correction.data.copy_(torch.linspace(0.3, -0.3, E))
    kernel = router._route

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["rule"])
        return kernel(*args, **kwargs)

    router._route = counted
    one = router(hidden)
    router.replay = lambda layer, tokens, experts: experts
    other = router(hidden)
    assert [rule.top_k for rule in calls] == [K]
    for name in ("logits", "scores", "experts", "weights"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.margin() == other.margin()
    grads = [
        torch.autograd.grad(x.weights.sum() + x.scores.square().sum(), router.weight)[0]
        for x in (one, other)
    ]
    torch.testing.assert_close(grads[0], grads[1])
