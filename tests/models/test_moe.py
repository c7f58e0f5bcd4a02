"""Whole models with experts: what is trained, and transformers' own classes as a second opinion."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

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
    check_layout,
    count_parameters,
    gpt2,
    llama,
)
from mcore_models.common import MoE
from mcore_models.common.moe import BALANCE_LOSS
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey
from mcore_parallel.layout import check_tiling

H, E, F, K = 8, 4, 6, 2
MOE = MoEConfig(num_experts=E, top_k=K, expert_ffn_size=F, aux_loss_coefficient=0.1)
CONFIG = llama(vocab_size=31, hidden_size=H, num_layers=2, num_heads=2, init_std=0.4)
CONFIG = replace(CONFIG, moe=MOE)


def changed(**fields: object) -> ModelConfig:
    return replace(CONFIG, moe=replace(MOE, **fields))  # type: ignore[arg-type]


def test_the_loss_is_part_of_training_and_of_nothing_else() -> None:
    """A gradient by `loss` in training mode; none by evaluation, logits or coefficient 0."""
    model = build_model(CONFIG, key=RngKey(4))
    tokens = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(1))
    batch = TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1))
    counts = GlobalCounts(tokens=16)

    def gradient(training: bool, config: ModelConfig = CONFIG) -> tuple[float, Tensor]:
        model.train(training).zero_grad()
        for layer in model.layers.values():
            layer.moe.config = config.moe  # type: ignore[assignment, union-attr]
        loss = model.loss(batch, counts=counts)
        loss.backward()
        grad = model.get_parameter("layers.1.moe.router.weight").grad
        assert grad is not None
        return float(loss.detach()), grad

    value, with_it = gradient(True)
    evaluated, without = gradient(False)
    assert value == evaluated
    assert not torch.equal(with_it, without)
    assert torch.equal(without, gradient(True, changed(aux_loss_coefficient=0.0))[1])
    assert model.auxiliary_losses(counts).names == (BALANCE_LOSS,)
    silent = build_model(changed(aux_loss_coefficient=0.0), device="meta")
    assert silent.auxiliary_losses(counts).names == ()


def test_both_layers_are_counted_and_only_when_their_gradient_is() -> None:
    model = build_model(CONFIG, key=RngKey(4))
    tokens = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(1))
    batch = TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1))
    counts = GlobalCounts(tokens=16)
    auxiliary = model.auxiliary_losses(counts)
    model.loss(batch, counts=counts, auxiliary=auxiliary)
    assert auxiliary.shares() == {BALANCE_LOSS: 0}
    model.loss(batch, counts=counts, auxiliary=auxiliary).backward()
    # Each layer's loss is near its least value, coefficient · 1.
    assert float(auxiliary.shares()[BALANCE_LOSS]) == pytest.approx(0.2, rel=0.3)
    assert float(auxiliary.shares()[BALANCE_LOSS]) >= 0.2 * 0.9


def test_a_gpt2_dress_has_experts_with_biases() -> None:
    config = gpt2(vocab_size=31, hidden_size=H, num_layers=2, num_heads=2)
    model = build_model(replace(config, moe=MOE, pattern="*- *E"))  # type: ignore[arg-type]
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if "layers.1.moe" in n}
    assert shapes == {
        "layers.1.moe.router.weight": (E, H),
        "layers.1.moe.experts.up.weight": (E, F, H),
        "layers.1.moe.experts.up.bias": (E, F),
        "layers.1.moe.experts.down.weight": (E, H, F),
        "layers.1.moe.experts.down.bias": (E, H),
    }


EVERYTHING = changed(
    router_bias=True, correction_rate=0.1, aux_loss_scope="global", latent_size=4,
    shared_ffn_size=12, shared_gate=True,
)  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("layout", ["tp=2,pp=2,dp=4,ep=4,etp=1", "tp=2,dp=3,ep=2,etp=3"])
def test_the_ranks_together_hold_every_tensor(layout: str, config: ModelConfig) -> None:
    """And as many parameters as are counted, to which what is not trained does not belong."""
    parallel = ParallelConfig.parse(layout)
    config, world = replace(config, vocab_size=30), parallel.model_size * (parallel.dp or 1)
    layouts, untrained = [], set()
    for rank in range(world):
        mesh = ParallelMesh.arithmetic(parallel, world_size=world, rank=rank)
        model = build_model(config, mesh, device="meta")
        untrained |= {n for n, p in model.named_parameters() if not p.requires_grad}
        for spec in model.specs().values():
            copies = mesh.edp if spec.expert else mesh.dp_cp
            layouts.append(spec.layout.replicated(copies.rank, copies.size))
    check_tiling(layouts)
    sizes = {f.name: math.prod(f.global_shape) for layout in layouts for f in layout.fragments}
    assert untrained == {name for name in sizes if name.endswith((".correction", ".load"))}
    trained = sum(size for name, size in sizes.items() if name not in untrained)
    counted = count_parameters(config)
    assert trained == counted.total
    idle = [size // E * (E - K) for name, size in sizes.items() if ".experts." in name]
    assert counted.active == counted.total - sum(idle)


def test_shared_experts_are_cut_over_tp() -> None:
    with pytest.raises(ValueError, match=r"moe.shared_ffn_size=9 cannot be cut over tp=2: use tp="):
        check_layout(changed(shared_ffn_size=9), ParallelConfig(tp=2, dp=1))


def views(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts of local tensors by global name."""
    specs = model.specs()  # type: ignore[operator]
    return {
        fragment.name: view
        for name, value in values.items()
        for fragment, view in specs[name].layout.views(value)
    }


def from_mixtral(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {
        "embedding.weight": weights["model.embed_tokens.weight"],
        "final_norm.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    names = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
    names |= {f"self_attn.{x}_proj": f"attention.{x}" for x in "qkvo"}
    names |= {"mlp.gate": "moe.router"}
    for i in range(sum(name.endswith("input_layernorm.weight") for name in weights)):
        layer = f"model.layers.{i}"
        for theirs, ours in names.items():
            found[f"layers.{i}.{ours}.weight"] = weights[f"{layer}.{theirs}.weight"]
        gate, up = weights[f"{layer}.mlp.experts.gate_up_proj"].chunk(2, 1)
        down = weights[f"{layer}.mlp.experts.down_proj"]
        for name, value in {"gate": gate, "up": up, "down": down}.items():
            found[f"layers.{i}.moe.experts.{name}.weight"] = value
    return found


def test_mixtral_has_transformers_logits_and_gradients() -> None:
    transformers = pytest.importorskip("transformers")
    config = llama(
        vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, rope_base=1e6
    )
    config = replace(config, moe=MoEConfig(num_experts=6, top_k=2, expert_ffn_size=24))
    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=24, num_local_experts=6,
            num_experts_per_tok=2, rms_norm_eps=1e-5, initializer_range=0.2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6}, sliding_window=None,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    ours = build_model(config)
    weights = from_mixtral(dict(theirs.named_parameters()))
    local = views(ours, {n: p.detach() for n, p in ours.named_parameters()})
    assert local.keys() == weights.keys()
    with torch.no_grad():
        for name, view in local.items():
            view.copy_(weights[name])
    tokens = torch.randint(97, (2, 24))
    found, want = ours(tokens), theirs(tokens).logits
    assert (found - want).norm() < 1e-5 * want.norm()
    direction = torch.randn_like(want)
    (found * direction).sum().backward()
    (want * direction).sum().backward()
    wanted = from_mixtral({n: p.grad for n, p in theirs.named_parameters() if p.grad is not None})
    total = torch.stack([value.norm() for value in wanted.values()]).norm()
    given = views(ours, {n: p.grad for n, p in ours.named_parameters() if p.grad is not None})
    assert given.keys() == wanted.keys()
    for name, gradient in given.items():
        distance = (gradient - wanted[name]).norm()
        assert distance < 1e-4 * max(wanted[name].norm(), 1e-3 * total), name


@pytest.mark.parametrize("normalise", [True, False])
def test_a_block_equals_transformers_and_so_does_its_balance_loss(normalise: bool) -> None:
    """Theirs adds up f_e over the k choices, so that it is k times ours."""
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = changed(
        normalise_top_k=normalise, aux_loss_scope="micro_batch", aux_loss_coefficient=1.0
    )
    kernels = Kernels(KernelConfig(), Target.of("cpu"))
    ours = MoE(config, BuildContext(mesh=ParallelMesh.single(), kernels=kernels), 0)
    theirs = modeling.Qwen3MoeSparseMoeBlock(
        modeling.Qwen3MoeConfig(
            hidden_size=H, num_experts=E, num_experts_per_tok=K, moe_intermediate_size=F,
            norm_topk_prob=normalise,
        )
    )  # fmt: skip
    torch.manual_seed(3)
    pairs = [
        (ours.router.weight, theirs.gate.weight),
        (ours.experts.get_parameter("gate_up.weight"), theirs.experts.gate_up_proj),
        (ours.experts.down.weight, theirs.experts.down_proj),
    ]
    for mine, other in pairs:
        with torch.no_grad():
            other.copy_(mine.normal_(std=0.5))
    hidden, mask = torch.randn(2, 6, H), torch.ones(2, 6)
    mask[0, 4:] = 0
    batch = TokenBatch.from_samples(mask.long(), loss_mask=mask)
    auxiliary = AuxiliaryLosses(GlobalCounts(tokens=mask.sum()), (BALANCE_LOSS,))
    out = ours(hidden.flatten(0, 1), TokenContext(batch=batch, auxiliary=auxiliary))
    want = theirs(hidden)
    torch.testing.assert_close(out, want.flatten(0, 1))
    logits = theirs.gate(hidden)[0]
    balance = modeling.load_balancing_loss_func((logits,), E, K, mask) / K
    direction = torch.randn_like(want)
    (out * direction.flatten(0, 1)).sum().backward()
    ((want * direction).sum() + balance).backward()
    torch.testing.assert_close(auxiliary.shares()[BALANCE_LOSS].float(), balance.detach())
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad, other.grad)
