"""Latent attention: positions, packed documents, what a cache keeps, and what is refused."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcore_kernels import KernelConfig, Kernels, Target
from mcore_models import (
    LatentAttentionConfig,
    ModelConfig,
    RopeConfig,
    TokenBatch,
    build_model,
    check_layout,
)
from mcore_models.common.latent_attention import latent_rotary
from mcore_models.common.recompute import RecomputeConfig
from mcore_models.latent_presets import LATENT_PRESETS, published_latent_configs
from mcore_parallel import ParallelConfig

LATENT = LatentAttentionConfig(
    num_heads=4, kv_rank=12, q_rank=20, head_dim=6, rope_dim=4, value_dim=10
)
MODEL = ModelConfig(vocab_size=37, hidden_size=24, num_layers=2, latent=LATENT, init_std=0.2)


def tokens_like(*shape: int) -> Tensor:
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(0))


def test_packed_documents_see_nothing_of_each_other() -> None:
    model, tokens = build_model(MODEL).eval(), tokens_like(1, 12)
    bounds = [0, 5, 6, 12]
    packed = TokenBatch.from_samples(tokens, cu_seqlens=torch.tensor(bounds))
    with torch.no_grad():
        together = model.stage_forward(packed)
        for a, b in pairwise(bounds):
            torch.testing.assert_close(together[a:b], model(tokens[:, a:b])[0])


@pytest.mark.parametrize("parts", [("latent_up",), ("core_attn",), ("latent_up", "core_attn")])
def test_what_is_computed_again_gives_the_same_bits(parts: tuple[str, ...]) -> None:
    """And fewer tensors are kept: of projections up and attention only what they start from."""
    batch = TokenBatch.from_samples(tokens_like(2, 9))
    gradients, kept = [], []
    for recompute in (RecomputeConfig(), RecomputeConfig(mode="selective", parts=parts)):
        model, sizes = build_model(MODEL, recompute=recompute), []
        with saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            logits = model.stage_forward(batch)
        logits.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        kept.append(sum(sizes))
    assert kept[1] < kept[0]
    for name, gradient in gradients[0].items():
        again = gradients[1][name]
        assert gradient is not None
        assert again is not None
        assert torch.equal(gradient, again), name


def test_only_the_rotary_channels_tell_positions() -> None:
    """Without them the last token says the same whatever the order of those before."""
    tokens = tokens_like(1, 9)
    mixed = tokens[:, [3, 1, 0, 2, 4, 7, 6, 5, 8]]
    for position, same in [("none", True), ("rope", False)]:
        model = build_model(replace(MODEL, num_layers=1, position=position)).eval()  # type: ignore[arg-type]
        with torch.no_grad():
            one, other = model(tokens)[0, -1], model(mixed)[0, -1]
        assert torch.allclose(one, other, atol=1e-5) == same


def test_pairs_of_neighbours_are_pairs_of_halves_in_another_order() -> None:
    """The same function when the rows of the weights that turn change places."""
    config = replace(MODEL, num_layers=1, rope=RopeConfig(interleaved=True))
    theirs, ours = (
        build_model(config).eval(),
        build_model(replace(config, rope=RopeConfig())).eval(),
    )
    halves = torch.tensor([0, 2, 1, 3])  # (0, 1), (2, 3) become (0, 2), (1, 3)
    with torch.no_grad():
        down = ours.get_parameter("layers.0.attention.down.weight")
        down[-4:] = down[-4:][halves]
        q = ours.get_parameter("layers.0.attention.q.weight").view(4, 10, 20)
        q[:, 6:] = q[:, 6:][:, halves]
        torch.testing.assert_close(ours(tokens_like(2, 9)), theirs(tokens_like(2, 9)))


@pytest.mark.parametrize("name", LATENT_PRESETS)
def test_angles_and_scale_of_published_models(name: str) -> None:
    """Those of transformers, far beyond the length at first; Kimi K2's ramp has equal ends."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = LATENT_PRESETS[name]
    their_config = transformers.DeepseekV3Config(**published_latent_configs()[name])
    positions = torch.tensor([0, 1, 77, 4095, 50000])
    rotary = theirs.DeepseekV3RotaryEmbedding(their_config)
    cos, sin = rotary(torch.zeros(1), positions[None])
    found = latent_rotary(config, positions)
    assert found is not None
    # Theirs takes angles in float32: those of position 50000 are off by a few thousandths.
    torch.testing.assert_close(found[0], cos[0, :, :32], rtol=0, atol=4e-3)
    torch.testing.assert_close(found[1], sin[0, :, :32], rtol=0, atol=4e-3)
    scaling = theirs.yarn_apply_mscale(their_config.rope_parameters, 192**-0.5)
    assert config.latent is not None
    assert config.latent.scale(config.rope) == pytest.approx(scaling)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent": {"num_heads": 4, "rope_dim": 5}}, r"latent.rope_dim=5 .*use 4 or 6"),
        ({"latent": {"num_heads": 0}}, "latent.num_heads=0 must be a whole number"),
        ({"latent": {"num_heads": 4, "norm_eps": 0.0}}, "latent.norm_eps=0.0"),
        ({"rope": RopeConfig(rotary_dim=2)}, "rope.rotary_dim=2 with latent attention"),
        ({"rope": RopeConfig(sections=(1, 1))}, r"rope.sections=\(1, 1\) with latent"),
        ({"latent": None, "pattern": "+- +-"}, "layer 0 asks for '\\+' and latent is not set"),
        ({"num_heads": 4, "pattern": "*- *-"}, "latent is set and no layer"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MODEL, **change)


def test_heads_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"latent.num_heads=4 cannot be cut over tp=3: use tp=2 or 4"
    ):
        check_layout(replace(MODEL, ffn_size=48), ParallelConfig(tp=3).resolve(3))
    layout = ParallelConfig.parse("tp=2,cp=4,cp-kind=all-to-all").resolve(8)
    with pytest.raises(ValueError, match=r"2 query and 2 kv heads .* over 4 ranks"):
        check_layout(MODEL, layout)
    with pytest.raises(ValueError, match="two parts called 'attention'"):
        build_model(replace(MODEL, num_heads=4, pattern=("+*", "+-")))


def test_the_kernel_that_is_named_and_wider_heads_than_it_takes() -> None:
    """On a GPU, that need not be there to say so: decoding uses what takes such heads."""
    target = Target(device_type="cuda", arch=(9, 0), dtype=torch.bfloat16)
    names = dict.fromkeys(Kernels().choices(), "reference")
    kernels = Kernels(KernelConfig(**{**names, "attention": "flash"}), target)
    wide = replace(MODEL, latent=LatentAttentionConfig(num_heads=4))
    mixer: Any = build_model(wide, kernels=kernels, device="meta").layers["0"].attention
    assert mixer._attention.name == "flash"
    assert mixer._over_latents.name == "reference"
    with pytest.raises(ValueError, match=r"'flash' cannot run on .*head"):
        build_model(
            replace(wide, latent=LatentAttentionConfig(num_heads=4, head_dim=256)),
            kernels=kernels,
            device="meta",
        )
