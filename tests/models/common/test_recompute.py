"""What a model recomputes: the same gradients bit for bit, from less memory, or a clear refusal."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_models import (
    GlobalCounts,
    MambaConfig,
    ModelConfig,
    MoEConfig,
    TokenBatch,
    build_model,
)
from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import ParallelConfig, RngKey, dropout
from mcore_parallel.testing.memory import kept_bytes

CONFIG = ModelConfig(
    vocab_size=37,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    dropout=0.1,
    pattern=("*-", "ME", "*E", "M-"),
    moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_size=24, aux_loss_coefficient=0.1),
    mamba=MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2, chunk_size=4),
)
ALL = ("core_attn", "mlp", "moe", "mamba", "norm")
BATCH = 2, 16


def example() -> TokenBatch:
    tokens = torch.randint(37, BATCH, generator=torch.Generator().manual_seed(0))
    return TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1))


def train(recompute: RecomputeConfig) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Gradients, auxiliary losses, and the bytes kept between forward and backward pass."""
    model = build_model(CONFIG, key=RngKey(5), recompute=recompute).train()
    counts, batch = GlobalCounts(tokens=BATCH[0] * BATCH[1]), example()
    auxiliary = model.auxiliary_losses(counts)
    loss, kept = kept_bytes(
        lambda: model.loss(batch, counts=counts, rng=RngKey(3), auxiliary=auxiliary)
    )
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}, auxiliary.shares(), kept


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    return train(RecomputeConfig())


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"mode": "full"}, 0.2),
        ({"mode": "full", "layers_together": 3}, 0.2),
        ({"mode": "full", "first_layers": 2}, 0.7),
        ({"mode": "selective"}, 0.999),
        *(({"mode": "selective", "parts": (part,)}, 0.95) for part in ALL[1:]),
        ({"mode": "selective", "parts": ALL}, 0.3),
    ],
)
def test_less_is_kept_and_gradients_are_bitwise_equal(
    plain: tuple[dict[str, Tensor], dict[str, Tensor], int], fields: dict[str, Any], most: float
) -> None:
    """U27: dropout 0.1 with recomputation; auxiliary losses are counted once.

    `most` is the share of the memory without it that is kept at most. Attention alone in plain
    torch keeps next to nothing but q, k and v, which are kept all the same.
    """
    gradients, auxiliary, kept = train(RecomputeConfig(**fields))
    assert kept < most * plain[2]
    assert gradients.keys() == plain[0].keys()
    for name, value in plain[0].items():
        assert torch.equal(gradients[name], value), name
    assert auxiliary == plain[1]
    assert auxiliary["moe_balance_loss"] > 0


def test_fresh_masks_in_the_backward_pass_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """U27: the loss is the same even so, and every gradient is wrong."""
    found = []
    for mode in ("none", "full"):
        calls = itertools.count()

        def fresh(x: Tensor, p: float, key: RngKey, rows: Tensor, calls: Any = calls) -> Tensor:
            return dropout(x, p, key.fold(next(calls)), rows)

        monkeypatch.setattr("mcore_models.common.context.dropout", fresh)
        found.append(train(RecomputeConfig(mode=mode))[0])
    plain, again = found
    assert torch.equal(plain["loss"], again["loss"])
    wrong = {name for name in plain if not torch.equal(plain[name], again[name])}
    assert {"layers.0.mlp.gate_up.weight", "layers.3.mamba.a_log"} <= wrong


def test_validation_and_decoding_recompute_nothing() -> None:
    model = build_model(CONFIG, recompute=RecomputeConfig(mode="full")).eval()
    with torch.no_grad():
        logits, kept = kept_bytes(lambda: model(torch.arange(16).reshape(2, 8)))
    assert kept == logits.nbytes


@pytest.mark.parametrize(
    ("fields", "layout", "message"),
    [
        ({"spread": True}, "tp=2,sp", "sequence parallelism spreads them already"),
        ({"spread": True}, "", "tp=1; use spread=false"),
        ({"first_layers": 3}, "pp=2", "first_layers=3, .* more than 2 of the 4 layers: use 2 or"),
        ({"layers_together": 2}, "pp=2,chunks=2,schedule=interleaved", "more than 1 of the 4"),
    ],
)
def test_what_a_layout_does_not_have_is_refused(
    fields: dict[str, Any], layout: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RecomputeConfig(mode="full", **fields).check(CONFIG, ParallelConfig.parse(layout))


def test_what_a_model_does_not_have_is_refused() -> None:
    dense = ModelConfig(vocab_size=37, hidden_size=32, num_layers=1, num_heads=4)
    asked = RecomputeConfig(mode="selective", parts=("core_attn", "moe"))
    norms = RecomputeConfig(mode="selective", parts=("norm",))
    with pytest.raises(ValueError, match="no 'norm'; it has core_attn, mlp"):
        norms.check(replace(dense, norm_place="post"), ParallelConfig())
    with pytest.raises(ValueError, match="no 'moe'; it has core_attn, mlp, norm"):
        build_model(dense, recompute=asked)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "full", "parts": ("mlp",)}, r"\['mlp'\] belong to mode selective, not full"),
        ({"mode": "ful"}, "mode='ful' is none of none, full, selective: did you mean 'full'"),
        ({"spread": True}, "spread=True belongs to mode full, not none"),
        ({"mode": "selective", "first_layers": 1}, "first_layers=1 belongs to mode full"),
        ({"mode": "full", "layers_together": 0}, "layers_together=0 must be at least 1"),
        ({"mode": "selective", "parts": ("mlp", "attention")}, "some of core_attn, mlp, moe"),
        ({"mode": "selective", "parts": ()}, r"\[\] must be some of"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecomputeConfig(**fields)
