"""Losses, log-probabilities and entropies, whole and fused with the output layer."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from mcore_kernels import (
    Kernels,
    LossTerms,
    SoftCap,
    VocabLoss,
    VocabShard,
    fused_head_log_probs,
    fused_head_loss,
    resolve,
    vocab_loss,
)
from mcore_kernels.ops.linear.reference import ReferenceLinear

kernels = Kernels()
WHOLE = VocabShard(vocab_size=31)
TERMS = LossTerms(label_smoothing=0.1, z_loss=0.01, ignore_index=4)


def expected(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, log-probability and entropy, from torch's own functions."""
    classes = logits.shape[1]
    log_p = logits.log_softmax(-1)
    valid = labels != terms.ignore_index
    label = labels.clamp(0, classes - 1).unsqueeze(1)
    q = torch.full_like(logits, terms.label_smoothing / (classes - 1))
    q.scatter_(1, label, 1 - terms.label_smoothing)
    loss = -(q * log_p).sum(-1) + terms.z_loss * logits.logsumexp(-1).square()
    loss = loss if weights is None else loss * weights
    entropy = -(log_p.exp() * log_p).sum(-1)
    found = (loss, log_p.gather(1, label).squeeze(1), entropy)
    return tuple(torch.where(valid, one, 0.0) for one in found)  # type: ignore[return-value]


class Shards:
    """Reductions between threads, one for each shard."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._parts: list[torch.Tensor] = []

    def reduce(self, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def reduced(x: torch.Tensor) -> torch.Tensor:
            self._parts.append(x)
            self._barrier.wait()
            result = how(torch.stack(self._parts))
            if self._barrier.wait() == 0:
                self._parts = []
            self._barrier.wait()
            return result

        return reduced

    def shard(self, vocab_size: int, first: int) -> VocabShard:
        return VocabShard(
            vocab_size=vocab_size,
            first=first,
            reduce_max=self.reduce(lambda parts: parts.amax(0)),
            reduce_sum=self.reduce(lambda parts: parts.sum(0)),
        )


@pytest.mark.parametrize("terms", [LossTerms(), TERMS])
@pytest.mark.parametrize("name", ["reference", "eager"])
def test_over_shards_as_torch_has_it(name: str, terms: LossTerms) -> None:
    """Every gradient too, with weights, ignored tokens and one shard without columns."""
    op = resolve("cross_entropy", target=kernels.target, require=name)
    logits = torch.randn(12, 31, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.arange(12) * 7 % 31, torch.rand(12, dtype=torch.float64)
    labels[3] = terms.ignore_index
    bounds, shards = [0, 9, 9, 31], Shards(3)
    pieces = [logits.detach()[:, a:b].requires_grad_() for a, b in pairwise(bounds)]

    def run(i: int) -> tuple[torch.Tensor, ...]:
        shard = shards.shard(31, bounds[i])
        got = vocab_loss(
            pieces[i], labels, op=op, shard=shard, terms=terms, weights=weights, entropy=True
        )
        assert got.entropy is not None
        return got.loss, got.log_prob, got.entropy

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, range(3)))
    wanted = expected(logits, labels, weights, terms)
    grads = [torch.linspace(-1, 2, 12, dtype=torch.float64) * k for k in (1, 2, 3)]
    torch.autograd.backward(wanted, grads)
    for i, results in enumerate(found):
        for one, other in zip(results, wanted, strict=True):
            torch.testing.assert_close(one, other.detach())
        torch.autograd.backward(results, grads)
        assert logits.grad is not None
        torch.testing.assert_close(pieces[i].grad, logits.grad[:, bounds[i] : bounds[i + 1]])


def test_each_result_alone_has_its_gradient() -> None:
    logits = torch.randn(5, 31, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(5)
    for i in range(3):
        got = vocab_loss(
            logits, labels, op=kernels.cross_entropy, shard=WHOLE, terms=TERMS, entropy=True
        )
        results = (got.loss, got.log_prob, got.entropy)
        wanted = expected(logits, labels, None, TERMS)
        (found,) = torch.autograd.grad(results[i].sum(), logits)  # type: ignore[union-attr]
        (other,) = torch.autograd.grad(wanted[i].sum(), logits)
        torch.testing.assert_close(found, other)


def test_classes_ruled_out_and_certain_tokens_have_an_entropy() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, -torch.inf, -torch.inf]])
    logits.requires_grad_()
    got = vocab_loss(
        logits,
        torch.tensor([0, 0]),
        op=kernels.cross_entropy,
        shard=VocabShard(vocab_size=3),
        entropy=True,
    )
    assert got.entropy is not None
    torch.testing.assert_close(got.entropy, torch.tensor([2.0, 1.0]).log())
    (gradient,) = torch.autograd.grad(got.entropy.sum() + got.log_prob.sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]]))


def test_smoothing_is_over_the_other_classes() -> None:
    """The arithmetic of U23, as a loss: large logits stay finite."""
    logits, labels = torch.arange(8.0).unsqueeze(0), torch.tensor([3])
    for scale in (1.0, 1000.0):
        got = vocab_loss(
            logits * scale,
            labels,
            op=kernels.cross_entropy,
            shard=VocabShard(vocab_size=8),
            terms=LossTerms(label_smoothing=0.1),
        )
        assert bool(got.loss.isfinite().all())
        assert scale > 1 or got.loss.item() == pytest.approx(4.401197, abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [None, 5, 100])
def test_fused_with_the_output_layer(dtype: torch.dtype, chunk_size: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(13, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(31, 8, generator=generator).to(dtype).requires_grad_()
    labels, weights = torch.arange(13) * 5 % 31, torch.rand(13, generator=generator)
    fused = fused_head_loss(
        hidden,
        weight,
        labels,
        linear=kernels.linear,
        op=kernels.cross_entropy,
        shard=WHOLE,
        terms=TERMS,
        weights=weights,
        entropy=True,
        chunk_size=chunk_size,
    )
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = expected(wide[0] @ wide[1].t(), labels, weights.double(), TERMS)
    results = (fused.tokens.loss, fused.tokens.log_prob, fused.tokens.entropy)
    close = (
        {"rtol": 2e-2, "atol": 4e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    for one, other in zip(results, wanted, strict=True):
        assert one is not None
        assert not one.requires_grad
        torch.testing.assert_close(one.double(), other.detach(), **close)
    found = torch.autograd.grad(fused.total * 3, (hidden, weight))
    other_grads = torch.autograd.grad(wanted[0].sum() * 3, wide)
    for one, other in zip(found, other_grads, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, **close)


def test_chunks_change_nothing_and_ignored_tokens_get_nothing() -> None:
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([4, 1, 2, 4, 30, 0, 4])
    arguments = {
        "linear": kernels.linear,
        "op": kernels.cross_entropy,
        "shard": WHOLE,
        "terms": TERMS,
    }
    whole = fused_head_loss(hidden, weight, labels, **arguments)
    parts = fused_head_loss(hidden, weight, labels, **arguments, chunk_size=2)
    torch.testing.assert_close(parts.total, whole.total)
    one, other = (torch.autograd.grad(x.total, (hidden, weight)) for x in (whole, parts))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)
    assert one[0][labels == 4].abs().max() == 0.0
    nothing = fused_head_loss(hidden[:0], weight, labels[:0], **arguments)
    assert nothing.total.item() == 0.0
    assert torch.autograd.grad(nothing.total, weight)[0].abs().max() == 0.0


def test_gradient_into_a_buffer_and_logits_never_whole() -> None:
    rows_seen: list[int] = []

    class Watched(ReferenceLinear):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            rows_seen.append(x.shape[0])
            return super().forward(x, weight)

    hidden = torch.randn(10, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(31, 8, dtype=torch.bfloat16, requires_grad=True)
    labels, buffer = torch.arange(10), torch.full((31, 8), 0.5)
    arguments = {"linear": Watched(), "op": kernels.cross_entropy, "shard": WHOLE, "chunk_size": 4}
    fused = fused_head_loss(hidden, weight, labels, **arguments, weight_grad_out=buffer)
    fused.total.backward()
    assert rows_seen == [4, 4, 2]
    assert weight.grad is None
    wide = weight.detach().float().requires_grad_()
    F.cross_entropy(hidden.detach().float() @ wide.t(), labels, reduction="sum").backward()
    assert wide.grad is not None
    torch.testing.assert_close(buffer - 0.5, wide.grad, rtol=2e-2, atol=4e-2)


def test_log_probabilities_with_gradients_known_later() -> None:
    hidden = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(9)
    got = fused_head_log_probs(
        hidden,
        weight,
        labels,
        linear=kernels.linear,
        op=kernels.cross_entropy,
        shard=WHOLE,
        terms=TERMS,
        entropy=True,
        chunk_size=4,
    )
    wanted = expected(hidden @ weight.t(), labels, None, TERMS)
    grads = [torch.linspace(-1, 2, 9, dtype=torch.float64) * k for k in (1, 2, 3)]
    results = (got.loss, got.log_prob, got.entropy)
    found = torch.autograd.grad(results, (hidden, weight), grads)
    for one, other in zip(found, torch.autograd.grad(wanted, (hidden, weight), grads), strict=True):
        torch.testing.assert_close(one, other)
    ratio = fused_head_log_probs(
        hidden, weight, labels, linear=kernels.linear, op=kernels.cross_entropy, shard=WHOLE
    )
    assert ratio.entropy is None
    ratio.log_prob.exp().sum().backward()
    assert hidden.grad is not None


class Halved:
    """A change that keeps nothing, and widens."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, None]:
        return logits.double() / 2, None

    def backward(self, grad: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        return grad / 2


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bias_and_changes_of_the_logits(dtype: torch.dtype, later: bool) -> None:
    """Bias and cap, then a change of one's own, forward and backward, by both operators."""
    generator = torch.Generator().manual_seed(2)
    shapes = (13, 8), (31, 8), (31,)
    factors = [torch.randn(*shape, generator=generator, dtype=dtype) * 2 for shape in shapes]
    hidden, weight, bias = (one.requires_grad_() for one in factors)
    labels, weights = torch.arange(13) * 5 % 31, torch.rand(13, generator=generator, dtype=dtype)
    buffer = torch.full_like(weight, 0.5)
    fused = (fused_head_log_probs if later else fused_head_loss)(
        hidden,
        weight,
        labels,
        linear=kernels.linear,
        op=kernels.cross_entropy,
        shard=WHOLE,
        bias=bias,
        changes=[SoftCap(3.0), Halved()],
        terms=TERMS,
        weights=weights,
        chunk_size=5,
        weight_grad_out=buffer.requires_grad_(False),
    )
    wide = [one.detach().double().requires_grad_() for one in (hidden, weight, bias)]
    logits = (F.linear(*wide) / 3).tanh() * 1.5
    wanted = expected(logits, labels, weights.double(), TERMS)[0].sum()
    total = fused.loss.sum() if isinstance(fused, VocabLoss) else fused.total
    torch.testing.assert_close(total.double(), wanted)
    total.backward()
    wanted.backward()
    assert weight.grad is None
    found = (hidden.grad, buffer - 0.5, bias.grad)
    for one, other in zip(found, wide, strict=True):
        assert one is not None
        assert other.grad is not None
        torch.testing.assert_close(one.double(), other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossTerms(label_smoothing=1.0), r"label_smoothing must be in \[0, 1\), got 1.0"),
        (lambda: LossTerms(z_loss=-1.0), "z_loss must be finite and not negative, got -1.0"),
        (lambda: LossTerms(z_loss=float("nan")), "z_loss must be finite and not negative, got nan"),
        (
            lambda: LossTerms(label_smoothing=0.1).on_all(1),
            "label_smoothing needs 2 classes, there are 1",
        ),
    ],
)
def test_terms_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_sizes_that_do_not_fit() -> None:
    arguments = {"linear": kernels.linear, "op": kernels.cross_entropy, "shard": WHOLE}
    hidden, weight, labels = torch.ones(3, 8), torch.ones(31, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"weight \[31, 7\] and labels \[3\] do not fit"):
        fused_head_loss(hidden, weight[:, :7], labels, **arguments)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        fused_head_loss(hidden, weight, labels, **arguments, chunk_size=0)
    with pytest.raises(ValueError, match=r"bias must be \[31\], got \[30\]"):
        fused_head_log_probs(hidden, weight, labels, **arguments, bias=torch.ones(30))


@pytest.mark.parametrize("stray", [31, -1])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["reference", "eager"])
def test_a_label_that_is_no_class_is_seen(name: str, fused: bool, stray: int) -> None:
    """Its results and gradients are NaN, over shards too, and those of its neighbours are not."""
    op = resolve("cross_entropy", target=kernels.target, require=name)
    hidden = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 8, dtype=torch.float64)
    labels, seen = torch.tensor([5, stray, 4]), torch.tensor([False, True, False])
    shards = Shards(2)

    def run(rows: slice) -> tuple[VocabLoss, torch.Tensor]:
        x, shard = hidden.detach().requires_grad_(), shards.shard(31, rows.start)
        if fused:
            found = fused_head_log_probs(
                x, weight[rows], labels, linear=ReferenceLinear(), op=op, shard=shard,
                terms=TERMS, entropy=True,
            )  # fmt: skip
        else:
            logits = x @ weight[rows].T
            found = vocab_loss(logits, labels, op=op, shard=shard, terms=TERMS, entropy=True)
        (found.loss.sum() + found.log_prob.sum()).backward()
        assert x.grad is not None
        return found, x.grad

    with ThreadPoolExecutor(2) as pool:
        for found, grad in pool.map(run, (slice(0, 20), slice(20, 31))):
            assert found.entropy is not None
            for one in (found.loss, found.log_prob, found.entropy):
                assert torch.equal(one.isnan(), seen)
            assert torch.equal(grad.isnan().all(1), seen)
            assert torch.equal(grad.isnan().any(1), seen)
