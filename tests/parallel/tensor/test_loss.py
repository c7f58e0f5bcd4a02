"""Cross-entropy and log-probability over shards of the vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel import Group
from mcore_parallel.tensor import vocab_parallel_cross_entropy, vocab_parallel_log_prob
from mcore_parallel.testing import RankPool


def shard(logits: Tensor, group: Group) -> Tensor:
    """My columns, padded with a value that would spoil everything it entered."""
    columns = -(-logits.shape[1] // group.size)
    padded = F.pad(logits, (0, columns * group.size - logits.shape[1]), value=float("nan"))
    return padded.chunk(group.size, dim=1)[group.rank].clone().requires_grad_()


def cross_entropy(
    logits: Tensor, labels: Tensor, terms: dict[str, float], weights: Tensor
) -> tuple[Tensor, Tensor]:
    group = Group.world()
    local = shard(logits, group)
    loss = vocab_parallel_cross_entropy(local, labels, group, vocab_size=logits.shape[1], **terms)
    (loss * weights).sum().backward()
    assert local.grad is not None
    return loss.detach(), local.grad


def log_prob(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    group = Group.world()
    local = shard(logits, group)
    result = vocab_parallel_log_prob(local, labels, group, vocab_size=logits.shape[1])
    result.sum().backward()
    assert local.grad is not None
    return result.detach(), local.grad


def joined(grads: list[Tensor], vocab: int) -> Tensor:
    whole = torch.cat(grads, dim=1)
    assert not whole[:, vocab:].any()
    return whole[:, :vocab]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_smoothed_example(ranks: RankPool, size: int) -> None:
    """U23: α is spread over the other K - 1 classes, alike on all ranks."""
    one = torch.ones(1)
    terms = {"label_smoothing": 0.1}
    seen = ranks.run(cross_entropy, size, torch.arange(8.0)[None], torch.tensor([3]), terms, one)
    for loss, _ in seen:
        assert loss.item() == pytest.approx(4.401197, abs=2e-6)
    # Gradient: softmax less the smoothed target distribution.
    target = torch.full((8,), 0.1 / 7)
    target[3] = 0.9
    expected = torch.arange(8.0).softmax(0) - target
    torch.testing.assert_close(joined([g for _, g in seen], 8)[0], expected, rtol=0, atol=1e-6)


def reference(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Written out from the definition, in float64."""
    k = logits.shape[1]
    target = torch.full_like(logits, label_smoothing / max(k - 1, 1))
    target[torch.arange(len(labels)), labels] = 1.0 - label_smoothing
    loss = -(target * logits.log_softmax(-1)).sum(-1)
    return loss + z_loss * logits.logsumexp(-1).square()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize(
    "terms", [{}, {"label_smoothing": 0.25}, {"label_smoothing": 0.1, "z_loss": 0.3}], ids=str
)
@pytest.mark.parametrize(("vocab", "size"), [(8, 2), (7, 2), (7, 4), (5, 4), (33, 4), (7, 1)])
def test_equals_dense(
    ranks: RankPool, vocab: int, size: int, terms: dict[str, float], scale: float
) -> None:
    """U23, U24: any size, padded or not, large logits, a rank without real columns."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator) * scale + 5 * scale
    labels = torch.randint(vocab, (6,), generator=generator)
    labels[0], labels[1] = 0, vocab - 1
    weights = torch.rand(6, generator=generator)
    seen = ranks.run(cross_entropy, size, logits, labels, terms, weights)
    exact = logits.double().requires_grad_()
    expected = reference(exact, labels, **terms)
    (expected * weights).sum().backward()
    assert exact.grad is not None
    for loss, _ in seen:
        assert loss.dtype == torch.float32
        assert torch.isfinite(loss).all()
        torch.testing.assert_close(loss, expected.float().detach(), rtol=2e-6, atol=2e-6 * scale)
        assert torch.equal(loss, seen[0][0]), "ranks disagree"
    grad = joined([g for _, g in seen], vocab)
    torch.testing.assert_close(grad, exact.grad.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_log_prob_gradient_example(ranks: RankPool, size: int) -> None:
    """U25: the gradient is right on the rank that does not own the token."""
    seen = ranks.run(log_prob, size, torch.arange(4.0)[None], torch.tensor([3]))
    grad = joined([g for _, g in seen], 4)
    expected = torch.tensor([[-0.0321, -0.0871, -0.2369, 0.3561]])
    torch.testing.assert_close(grad, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize(("vocab", "size"), [(8, 2), (7, 4), (5, 4)])
def test_log_prob_equals_dense(ranks: RankPool, vocab: int, size: int) -> None:
    """U25, other sizes: every token of the vocabulary once."""
    logits = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(vocab)
    seen = ranks.run(log_prob, size, logits, labels)
    exact = logits.double().requires_grad_()
    expected = exact.log_softmax(-1).diagonal()
    expected.sum().backward()
    assert exact.grad is not None
    for value, _ in seen:
        torch.testing.assert_close(value, expected.float().detach(), rtol=1e-6, atol=1e-6)
    grad = joined([g for _, g in seen], vocab)
    torch.testing.assert_close(grad, exact.grad.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_bf16_logits_give_float32_loss_and_bf16_gradient(ranks: RankPool, size: int) -> None:
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(2)).bfloat16()
    labels = torch.tensor([0, 1, 2, 4, 5])
    seen = ranks.run(cross_entropy, size, logits, labels, {}, torch.ones(5))
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    expected.sum().backward()
    assert exact.grad is not None
    for loss, grad in seen:
        assert (loss.dtype, grad.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(loss, expected.float().detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(joined([g for _, g in seen], 6), exact.grad.bfloat16())


@pytest.mark.parametrize("size", [1, 2])
def test_masked_tokens_leave_no_trace(ranks: RankPool, size: int) -> None:
    """A label such as -100, or one in the padding, is finite and drops out under a mask of 0."""
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([-100, 2, 7])
    mask = torch.tensor([0.0, 1.0, 0.0])
    terms = {"label_smoothing": 0.1, "z_loss": 0.1}
    seen = ranks.run(cross_entropy, size, logits, labels, terms, mask)
    grad = joined([g for _, g in seen], 7)
    assert torch.isfinite(seen[0][0]).all()
    assert not grad[0].any()
    assert grad[1].any()
    assert not grad[2].any()


def test_forbidden_tokens_at_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([2]), vocab_size=3)
    loss.sum().backward()
    assert logits.grad is not None
    p = 1 / (1 + torch.tensor(-1.0).exp())
    torch.testing.assert_close(loss, -p.log()[None])
    torch.testing.assert_close(logits.grad, torch.stack([1 - p, torch.zeros(()), p - 1])[None])


@pytest.mark.parametrize(
    ("columns", "vocab", "terms", "message"),
    [
        (8, 8, {"label_smoothing": 1.0}, r"label_smoothing is 1\.0, must be in \[0, 1\)"),
        (8, 8, {"label_smoothing": -0.1}, r"label_smoothing is -0\.1, must be in \[0, 1\)"),
        (1, 1, {"label_smoothing": 0.1}, "label_smoothing needs 2 classes, the vocabulary has 1"),
        (8, 8, {"z_loss": -1.0}, r"z_loss is -1\.0, must be at least 0"),
        (8, 9, {}, "vocabulary of 9 does not fit 8 columns on each of tp=1 ranks"),
    ],
)
def test_refusals(columns: int, vocab: int, terms: dict[str, float], message: str) -> None:
    logits, labels = torch.zeros(1, columns), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        vocab_parallel_cross_entropy(logits, labels, vocab_size=vocab, **terms)
