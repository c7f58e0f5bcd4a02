"""Sums of the residual stream that wait for the next norm: the same bits, in fewer passes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_models import (
    GlobalCounts,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    TokenBatch,
    build_model,
)
from mcore_models.common import RMSNorm
from mcore_models.common.builder import BuildContext
from mcore_models.common.recompute import RecomputeConfig
from mcore_models.common.residual import Residual
from mcore_parallel import RngKey

CONFIG = ModelConfig(
    vocab_size=37,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    dropout=0.1,
    init_std=0.2,
    pattern=("*-", "*E", "*."),
    moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_size=24, aux_loss_coefficient=0.1),
)
VARIANTS: dict[str, dict[str, Any]] = {
    "norms before parts": {},
    "further tokens": {"mtp": MTPConfig(num_depths=2)},
    "norms around parts": {"norm_place": "both", "residual_scale": 0.3},
    "norms after parts": {"norm_place": "post"},
    "norms of sums": {"norm_place": "sum"},
    "parallel": {"residual": "parallel", "zero_centered_norm": True},
    "layer norms": {"norm": "layer_norm"},
}


def train(changes: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Loss and gradients of one micro-batch with dropout."""
    config = replace(CONFIG, **changes)
    model = build_model(config, key=RngKey(5), **options).train()
    tokens = torch.randint(37, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1))
    loss = model.loss(batch, counts=GlobalCounts(tokens=32), rng=RngKey(3))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def at_once(stream: Residual, out: Tensor) -> Residual:
    return Residual(stream.settled() + out)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_late_sums_are_the_same_sums(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = train(VARIANTS[name], dtype=dtype)
    monkeypatch.setattr(Residual, "plus", at_once)
    plain = train(VARIANTS[name], dtype=dtype)
    assert late.keys() == plain.keys()
    for key, value in plain.items():
        assert torch.equal(late[key], value), key


@pytest.mark.parametrize(
    ("options", "alone"),
    [
        ({}, {"input_norm": 1}),
        ({"recompute": RecomputeConfig(mode="full")}, {"input_norm": 3}),
        (
            {"recompute": RecomputeConfig(mode="selective", parts=("norm",))},
            {"input_norm": 3, "post_norm": 2},
        ),
    ],
)
def test_norms_take_the_sum_before_them(options: dict[str, Any], alone: dict[str, int]) -> None:
    """All but those of what comes in one tensor, or of what is kept for norming it again."""
    model = build_model(CONFIG, **options)
    found = {"input_norm": 0, "post_norm": 0}

    def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        (name,) = (
            name for name in found if module in [getattr(b, name, None) for b in model.blocks]
        )
        found[name] += len(args) == 1

    for block in model.blocks:
        for name in found:
            if isinstance(norm := getattr(block, name, None), RMSNorm):
                norm.register_forward_pre_hook(count)
    model(torch.arange(16).reshape(2, 8), rng=RngKey(1))
    assert {name: times for name, times in found.items() if times} == alone


def test_a_norm_of_your_own_gets_the_sum() -> None:
    class Doubled(RMSNorm):
        def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * super().forward(hidden)

    def build(config: ModelConfig, context: BuildContext, layer: int) -> nn.Module:
        return Doubled(config.hidden_size, eps=1e-5, build=context)

    model = build_model(CONFIG, builders={"norm": build}).eval()
    assert model(torch.arange(8).reshape(1, 8)).isfinite().all()


def test_what_is_of_two_kinds_is_summed_as_torch_does() -> None:
    """Parts that give another dtype, or one row for all tokens."""
    norm: Any = build_model(CONFIG).blocks[0].input_norm
    hidden = torch.randn(4, 32)
    for out in (torch.randn(4, 32).bfloat16(), torch.randn(1, 32)):
        normed, stream = Residual(hidden).plus(out).normed(norm)
        assert stream.pending is None
        assert torch.equal(stream.total, hidden + out)
        assert torch.equal(normed, norm(hidden + out))
