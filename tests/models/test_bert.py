"""BERT: counted, cut over ranks, isolated by document, and its two losses by their definition."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_inference.runner import ModelRunner
from mcore_models import (
    AttentionConfig,
    BertConfig,
    GlobalCounts,
    ModelConfig,
    TokenBatch,
    build_model,
    count_parameters,
    flops_per_token,
    model_shape,
)
from mcore_models.bert import Bert, mean_pool, padded_batch

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    ffn_size=40,
    max_positions=16,
    norm="layer_norm",
    norm_place="sum",
    activation="gelu",
    position="learned",
    linear_bias=True,
    tied_embeddings=True,
    init_std=0.3,
    attention=AttentionConfig(causal=False),
    bert=BertConfig(),
)
ENCODER = BertConfig(masked_head=False, pair_head=False)
LENGTHS = (12, 7, 3)


def a_batch(seed: int = 1) -> TokenBatch:
    """Three samples of 12 positions with padding behind text, of whose pairs two have labels."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> Tensor:
        return torch.randint(high, (3, 12), generator=generator)

    batch = padded_batch(draw(61), torch.tensor(LENGTHS), token_types=draw(2))
    return replace(
        batch,
        labels=draw(61).flatten(),
        loss_mask=(draw(3) == 0).float().flatten(),
        document_labels=torch.tensor([1, -1, -1, -1, 0, -1]),
    )


def counts_of(batch: TokenBatch) -> GlobalCounts:
    assert batch.loss_mask is not None
    assert batch.document_labels is not None
    documents = float((batch.document_labels >= 0).sum())
    return GlobalCounts(tokens=float(batch.loss_mask.sum()), documents=documents)


def built(config: ModelConfig = CONFIG, **options: Any) -> Bert:
    model = build_model(config, **options)
    assert isinstance(model, Bert)
    return model


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, tied_embeddings=False),
        replace(CONFIG, tied_embeddings=False, bert=ENCODER),
        replace(CONFIG, bert=BertConfig(pooler=False, pair_head=False), linear_bias=False),
        replace(CONFIG, bert=BertConfig(num_token_types=3), norm="rms_norm", position="rope"),
        replace(CONFIG, bert=None),
        replace(CONFIG, norm_place="pre"),
    ],
)
def test_the_formula_counts_the_built_model(config: ModelConfig) -> None:
    model = build_model(config, device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    count = count_parameters(config)
    assert count.total == sum(sizes.values())
    tables = {name: size for name, size in sizes.items() if "embedding.weight" in name}
    assert count.embedding == sum(tables.values())
    products = sum(
        size
        for name, size in sizes.items()
        if name.endswith(".weight") and not any(x in name for x in ("norm", "embed", "pool", "bin"))
    )
    assert count.matmul == products + 61 * 24 * config.tied_embeddings


def test_attention_in_both_directions_costs_twice_as_much() -> None:
    causal = replace(CONFIG, attention=AttentionConfig(), bert=None)
    both = replace(causal, attention=AttentionConfig(causal=False))
    of_weights = model_shape(causal).flops_of_any_token
    once = flops_per_token(causal, 100) - of_weights
    assert flops_per_token(both, 100) - of_weights == pytest.approx(2 * once)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": AttentionConfig()}, "attention.causal=True and bert"),
        ({"bert": {"masked_head": False}}, "tied_embeddings=True and bert"),
        ({"bert": {"pooler": False}}, "bert.pair_head reads what bert.pooler makes"),
        ({"bert": {"num_token_types": 0}}, "bert.num_token_types=0"),
        ({"logit_scale": 2.0}, "logit_scale=2.0 and bert"),
        ({"residual": "parallel"}, "norm_place='sum' norms one sum after the other"),
    ],
)
def test_what_a_config_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        (17, {}, "a document of 17 tokens is longer than the position table: .* max_positions=16"),
        # Of padding behind a short text, too.
        (20, {"lengths": torch.tensor([8])}, "position 19 is not in the table of max_positions=16"),
        (2, {"positions": torch.tensor([[-1, 0]])}, "position -1 is not in the table of max_pos"),
        (2, {"lengths": torch.tensor([2, 1])}, r"lengths has shape \[2\]: give one of each, \[1\]"),
        (2, {"token_types": torch.tensor([[0, 2]])}, r"token type 2 .*num_token_types=2: use 0 to"),
    ],
)
def test_rows_that_no_table_has_and_lengths_of_nothing(
    size: int, arguments: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        built()(torch.zeros(1, size, dtype=torch.int64), **arguments)


def test_both_losses_by_their_definition() -> None:
    """Sums over what counts divided by how many there are; the second as an auxiliary loss."""
    model, batch = built(), a_batch()
    counts = counts_of(batch)
    auxiliary = model.auxiliary_losses(counts)
    loss = model.loss(batch, counts=counts, auxiliary=auxiliary)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == dict(model.named_parameters()).keys()
    model.zero_grad()
    assert batch.loss_mask is not None
    assert batch.labels is not None
    logits = model.stage_forward(batch)[:, :61]
    chosen = batch.loss_mask > 0
    masked = F.cross_entropy(logits[chosen], batch.labels[chosen])
    pooled = model.pool(model.encode(batch), batch)
    pairs = F.cross_entropy(model.pair_logits(pooled)[[0, 4]], torch.tensor([1, 0]))
    (masked + pairs).backward()
    torch.testing.assert_close(loss, masked)
    torch.testing.assert_close(auxiliary.shares()["pair_loss"].float(), pairs)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, found[name], msg=name)


def test_documents_are_isolated_exactly() -> None:
    """What stands in one text or in padding changes not a bit of what another gives."""
    model, batch = built().eval(), a_batch()
    with torch.no_grad():
        before = model.encode(batch)
        tokens = batch.tokens.clone()
        tokens[12:36] = (tokens[12:36] + 1) % 61
        after = model.encode(replace(batch, tokens=tokens))
        assert torch.equal(before[:12], after[:12])
        assert not torch.isclose(before[12:19], after[12:19]).any(-1).all()
        tokens = batch.tokens.clone()
        tokens[19:24] = 0
        assert torch.equal(before[:19], model.encode(replace(batch, tokens=tokens))[:19])
        # In both directions: the first token of a text sees the last.
        tokens[18] = (tokens[18] + 1) % 61
        assert not torch.equal(before[12], model.encode(replace(batch, tokens=tokens))[12])


def test_the_mean_of_a_document() -> None:
    batch = a_batch()
    hidden = torch.randn(36, 24)
    pooled = mean_pool(hidden, batch)
    assert pooled.shape == (6, 24)
    torch.testing.assert_close(pooled[2], hidden[12:19].mean(0))
    assert torch.equal(pooled[1], torch.zeros(24))


def test_what_decodes_refuses_it() -> None:
    with pytest.raises(ValueError, match="see later"):
        ModelRunner(built().eval())
