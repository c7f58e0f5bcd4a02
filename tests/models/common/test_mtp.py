"""Multi-token prediction: what is predicted from what, within documents, and where it lies."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_models import GPT, GlobalCounts, MTPConfig, TokenBatch, build_model, llama
from mcore_parallel import ParallelConfig, ParallelMesh

MODEL = replace(
    llama(vocab_size=37, hidden_size=24, num_layers=2, num_heads=4, init_std=0.2),
    mtp=MTPConfig(num_depths=2, loss_weight=0.6),
)


def batch_of(tokens: Tensor, bounds: list[int], mask: Tensor | None = None) -> TokenBatch:
    return TokenBatch.from_samples(
        tokens, labels=tokens.roll(-1, 1), loss_mask=mask, cu_seqlens=torch.tensor(bounds)
    )


def run(model: GPT, batch: TokenBatch) -> dict[str, float]:
    """The losses of every depth, by name, and of the model itself."""
    counts = GlobalCounts(tokens=float(batch.num_tokens))
    auxiliary = model.train().auxiliary_losses(counts)
    loss = model.loss(batch, counts=counts, auxiliary=auxiliary)
    loss.backward()
    return {**{k: float(v) for k, v in auxiliary.shares().items()}, "own": float(loss.detach())}


def test_what_lies_ahead_ends_with_the_document() -> None:
    tokens = torch.arange(10, 18)[None]
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    batch = batch_of(tokens, [0, 3, 4, 8], mask).look_ahead(2)
    assert batch.further_tokens is not None
    assert batch.further_mask is not None
    assert batch.further_tokens.t().tolist() == [
        [11, 12, 0, 0, 15, 16, 17, 0],
        [12, 0, 0, 0, 16, 17, 0, 0],
    ]
    # The label of token 12 does not count, whoever predicts it.
    assert batch.further_mask.t().tolist() == [[1, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 0]]
    first = batch.at_depth(0)
    assert first.labels is not None
    assert first.labels[4:7].tolist() == [16, 17, 10]  # the last of these is the sample's own


def test_nothing_is_predicted_across_documents() -> None:
    """Another text behind a document changes nothing of what is predicted within it."""
    model = build_model(MODEL)
    one = torch.randint(37, (1, 12), generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[:, 7:] = (other[:, 7:] + 5) % 37
    mask = (torch.arange(12) < 6).float()[None]  # token 6 is the end; its label is another's
    found = [run(model, batch_of(tokens, [0, 7, 12], mask)) for tokens in (one, other)]
    assert found[0] == found[1]
    assert found[0]["mtp_loss_0"] > found[0]["mtp_loss_1"] > 0


def test_depths_by_hand() -> None:
    """Norms, projection, layer, norm and head, depth upon depth."""
    model = build_model(MODEL)
    tokens = torch.randint(37, (1, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 9)
    mask[:, -1] = 0
    found = run(model, batch_of(tokens, [0, 9], mask))
    with torch.no_grad():
        batch = TokenBatch.from_samples(tokens)
        context = model._context(batch, None, None, None)
        hidden = model.final_norm(model.layers(model.embedding(tokens[0]), context))
        for depth in range(2):
            part: Any = model.mtp[str(depth)]
            ahead = model.embedding(tokens[0].roll(-depth - 1))
            joined = torch.cat([part.hidden_norm(hidden), part.embedding_norm(ahead)], 1)
            entered = joined @ part.project.weight.T
            hidden = part.final_norm(part.layers["0"](entered, context))
            count = 9 - depth - 2
            logits, labels = model.lm_head(hidden)[:count], tokens[0, depth + 2 :]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / 9
            assert found[f"mtp_loss_{depth}"] == pytest.approx(float(loss), rel=1e-5)


def test_they_add_to_the_gradient_alone_and_in_training_alone() -> None:
    """The loss is the model's own; the gradient of weight w is w / depths times the depths'."""
    tokens = torch.randint(37, (1, 9), generator=torch.Generator().manual_seed(0))
    batch = batch_of(tokens, [0, 9])
    gradients, losses = [], []
    for weight in (0.3, 0.6, 1.2):
        model = build_model(replace(MODEL, mtp=MTPConfig(num_depths=2, loss_weight=weight)))
        losses.append(run(model, batch))
        gradients.append(model.get_parameter("lm_head.weight").grad)
    assert losses[0] == losses[1] == losses[2]  # values are not weighed
    low, middle, high = gradients
    assert low is not None
    assert middle is not None
    assert high is not None
    torch.testing.assert_close(high - middle, 2 * (middle - low), rtol=1e-3, atol=1e-6)
    assert (middle - low).norm() > 0.01 * low.norm()
    counts = GlobalCounts(tokens=9.0)
    plain = build_model(replace(MODEL, mtp=None)).eval()
    assert torch.equal(model.eval().loss(batch, counts=counts), plain.loss(batch, counts=counts))


def test_a_share_of_a_batch_cannot_look_ahead() -> None:
    tokens = torch.randint(37, (1, 16))
    share = TokenBatch.from_samples(tokens, labels=tokens).share(0, 2)
    with pytest.raises(ValueError, match=r"look_ahead\(2\) before the batch is cut into 2 shares"):
        share.look_ahead(2)
    with pytest.raises(ValueError, match="needs labels, and the batch has none"):
        TokenBatch.from_samples(tokens).look_ahead(1)


def test_the_last_stage_has_them_and_a_copy_of_the_embedding() -> None:
    layout = ParallelConfig(pp=2)
    stages = [
        build_model(
            MODEL, ParallelMesh.arithmetic(layout, world_size=2, rank=rank), device="meta"
        ).specs()
        for rank in range(2)
    ]
    assert not any(name.startswith("mtp.") for name in stages[0])
    assert "mtp.1.layers.0.mlp.down.weight" in stages[1]
    for rank, specs in enumerate(stages):
        spec = specs["embedding.weight"]
        (fragment,) = spec.layout.fragments
        assert (fragment.replica, fragment.num_replicas) == (rank, 2)
        assert [sync.group.size for sync in spec.grad_sync] == [2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_depths": 0}, "mtp.num_depths=0 must be a whole number of at least 1"),
        ({"loss_weight": 0.0}, "mtp.loss_weight=0.0 must be greater than 0"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MODEL, mtp=fields)
