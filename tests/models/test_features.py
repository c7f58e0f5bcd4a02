"""What attention, blocks and MLPs can do besides: against formulas, and over every layout."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_models import (
    AttentionConfig,
    ModelConfig,
    RopeConfig,
    TokenBatch,
    build_model,
    llama,
)
from mcore_models.common.rope import rotary_angles
from mcore_parallel import Group, ParallelMesh, RngKey
from mcore_parallel.layout import LayoutTensor, gather_all

sys.path.append(str(Path(__file__).parent))
from plain_decoder import PlainDecoder

LLAMA = llama(
    vocab_size=37,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=40,
    init_std=0.3,
)
LAYER_NORMS = replace(
    LLAMA, norm="layer_norm", activation="gelu", linear_bias=True, init_depth_scaled=False
)
YARN = RopeConfig(scaling="yarn", factor=4.0, original_length=8, beta_fast=4.0)
LLAMA3 = RopeConfig(
    scaling="llama3", factor=8.0, original_length=64, low_freq_factor=1.0, high_freq_factor=4.0
)
FEATURES = {
    "norms of heads, gate": {
        "attention": AttentionConfig(qk_norm="head", gate=True),
        "attention_bias": True,
        "zero_centered_norm": True,
    },
    "norm over heads, norms after parts": {
        "attention": AttentionConfig(qk_norm="all", output_bias=True),
        "norm_place": "post",
        "activation": "geglu",
    },
    "windows, sinks, caps": {
        "attention": AttentionConfig(
            window=3, local_layers=(0, 2), local_rope_base=100.0, sinks=True, softcap=2.0, scale=0.3
        ),
        "norm_place": "both",
        "logit_softcap": 3.0,
        "embedding_scale": 5.0,
        "activation": "geglu_tanh",
        "rope": RopeConfig(scaling="linear", factor=3.0),
    },
    "partial and interleaved": {
        "rope": replace(YARN, rotary_dim=6, interleaved=True),
        "residual": "parallel",
        "activation": "squared_relu",
    },
    "without positions, clamped": {
        "attention": AttentionConfig(qk_norm="l2", nope_layers=(1,), window=4),
        "rope": LLAMA3,
        "activation": "quick_geglu",
        "glu_limit": 0.5,
        "glu_offset": 1.0,
        "residual_scale": 0.4,
        "logit_scale": 0.25,
    },
    "one norm for two": {"residual": "parallel_shared", "activation": "relu", "mlp_bias": True},
}
ON_LAYER_NORMS = {
    "norms of heads": {"attention": AttentionConfig(qk_norm="head", output_bias=False)},
    "without biases": {"norm_bias": False, "mlp_bias": False, "zero_centered_norm": True},
    "silu": {"activation": "silu", "norm_place": "both", "residual": "parallel"},
}
CASES = [
    *(pytest.param(LLAMA, change, id=name) for name, change in FEATURES.items()),
    *(
        pytest.param(LAYER_NORMS, change, id=f"layer norms, {name}")
        for name, change in ON_LAYER_NORMS.items()
    ),
]


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def packed() -> TokenBatch:
    """Documents of 3, 9, 1 and 3 tokens."""
    tokens = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
    return TokenBatch.from_samples(
        tokens, labels=tokens.roll(-1, 1), cu_seqlens=torch.tensor([0, 3, 12, 13, 16])
    )


def shaken(model: torch.nn.Module) -> None:
    """Move norms and biases away from their initial values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                shift = torch.linspace(-0.3, 0.4, parameter.shape[0])
                parameter.add_(shift.to(parameter.device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("base", "change"), CASES)
def test_a_decoder_follows_the_formulas(
    base: ModelConfig, change: dict[str, object], device: str
) -> None:
    """Logits, and the gradients of every weight."""
    config = replace(base, **change)  # type: ignore[arg-type]
    model = build_model(config, ParallelMesh.single(device), key=RngKey(3))
    shaken(model)
    specs = model.specs()
    tensors = {
        name: LayoutTensor(parameter.detach(), specs[name].layout)
        for name, parameter in model.named_parameters()
    }
    weights = gather_all(tensors, model.mesh.world)
    weights = {name: value.cpu().clone().requires_grad_() for name, value in weights.items()}
    batch = packed()
    logits = model.stage_forward(batch.to(device))[:, :37].cpu()
    want = PlainDecoder(config, weights)(batch)
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    logits.backward(grad)
    want.backward(grad)
    gradients = gather_all(
        {
            name: LayoutTensor(parameter.grad, specs[name].layout)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
        model.mesh.world,
    )
    assert gradients.keys() == weights.keys()
    total = torch.stack([x.norm().cpu() for x in gradients.values()]).norm()
    for name, value in weights.items():
        assert value.grad is not None
        distance = (gradients[name].cpu() - value.grad).norm()
        assert distance <= 1e-5 * max(value.grad.norm(), 1e-2 * total), name


def logits_of(config: ModelConfig, batch: TokenBatch) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = build_model(config, key=RngKey(3)).stage_forward(batch)
    return logits


def test_factors_of_a_document_follow_its_own_length() -> None:
    """Whatever it is packed with: longer ones than the original length are stretched."""
    rope = RopeConfig(
        scaling="longrope",
        factor=4.0,
        original_length=4,
        short_factors=(1.0,) * 4,
        long_factors=(4.0,) * 4,
    )
    config = replace(LLAMA, rope=rope)
    together = logits_of(config, packed())
    # The factor on cos and sin is that of the longest text, in documents of any length.
    for start, stop, factors in [(0, 3, (1.0,) * 4), (3, 12, (4.0,) * 4)]:
        alone = TokenBatch.from_samples(packed().tokens[None, start:stop])
        same = replace(rope, short_factors=factors, long_factors=factors)
        want = logits_of(replace(LLAMA, rope=same), alone)
        torch.testing.assert_close(together[start:stop], want, rtol=1e-5, atol=1e-5)


def test_documents_do_not_see_each_other() -> None:
    """Exactly, whatever attention does: windows, sinks, caps, factors by length (U41's kind)."""
    change = dict(FEATURES["windows, sinks, caps"])
    factors = {"short_factors": (1.0,) * 4, "long_factors": (4.0,) * 4}
    rope = RopeConfig(scaling="longrope", factor=4.0, original_length=4, **factors)  # type: ignore[arg-type]
    config, batch = replace(LLAMA, **{**change, "rope": rope}), packed()  # type: ignore[arg-type]
    other = batch.tokens.clone()
    other[3:12] = (other[3:12] + 1) % 37
    before, after = logits_of(config, batch), logits_of(config, replace(batch, tokens=other))
    assert torch.equal(before[:3], after[:3])
    assert torch.equal(before[12:], after[12:])
    assert not torch.equal(before[3:12], after[3:12])


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_turn_by_the_positions_of_their_axes(interleaved: bool) -> None:
    """As transformers' Qwen2-VL and Qwen3-VL do; text has equal positions on all axes."""
    rope = RopeConfig(sections=(2, 1, 1), interleaved_sections=interleaved)
    config, batch = replace(LLAMA, rope=rope), packed()
    axes = torch.stack([batch.positions] * 3, 1)
    plain = logits_of(LLAMA, batch)
    assert torch.equal(logits_of(config, batch), plain)
    assert torch.equal(logits_of(config, replace(batch, axis_positions=axes)), plain)
    # The second axis turns pair 2, or, interleaved, pair 1: as if that pair alone stood elsewhere.
    moved = axes.clone()
    moved[:, 1] += batch.tokens % 3
    shifted = replace(batch, axis_positions=moved)
    cos, _ = rotary_angles(config, shifted, Group.single())
    want, _ = rotary_angles(LLAMA, replace(batch, positions=moved[:, 1]), Group.single())
    rest, _ = rotary_angles(LLAMA, batch, Group.single())
    pair = 1 if interleaved else 2
    assert torch.equal(cos[:, pair], want[:, pair])
    others = [i for i in range(4) if i != pair]
    assert torch.equal(cos[:, others], rest[:, others])
    assert not torch.equal(logits_of(config, shifted), plain)
    with pytest.raises(ValueError, match=r"axis_positions has shape \(3, 16\)"):
        replace(batch, axis_positions=axes.t())


def test_axes_are_shared_out_as_tokens_are() -> None:
    axes = torch.arange(48).view(16, 3)
    batch = replace(packed(), axis_positions=axes)
    shares = [batch.share(rank, 2) for rank in range(2)]
    rows = torch.cat([share.axis_positions for share in shares if share.axis_positions is not None])
    assert all(any(torch.equal(row, axis) for row in rows) for axis in axes)
