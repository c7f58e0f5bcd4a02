"""The plain-torch defaults keep the contracts that the protocols state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.protocols import (
    SGD,
    AttentionGradOp,
    LinearOp,
    TorchAttention,
    TorchLinear,
    TorchVocabLoss,
    UpdateRule,
    VocabLossOp,
)

# Assignments that the type checker proves; at run time they are the objects under test.
linear: LinearOp = TorchLinear()
attention: AttentionGradOp = TorchAttention()
vocab_loss: VocabLossOp = TorchVocabLoss()
plain_sgd: UpdateRule = SGD()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------------------------- linear


def test_linear_methods_agree_with_autograd() -> None:
    x = random(5, 3, seed=1).requires_grad_()
    w = random(4, 3, seed=2).requires_grad_()
    b = random(4, seed=3).requires_grad_()
    dy = random(5, 4, seed=4)
    y = linear(x, w, b)
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    torch.testing.assert_close(linear.forward(x, w) + b, y)
    assert not linear.forward(x, w).requires_grad
    torch.testing.assert_close(linear.input_grad(dy, w), x.grad)
    torch.testing.assert_close(linear.weight_grad(dy, x), w.grad)
    out = torch.ones(4, 3, dtype=torch.float64)
    assert linear.weight_grad(dy, x, out=out) is out
    torch.testing.assert_close(out - 1.0, w.grad)


def test_linear_adds_to_a_float32_buffer_at_float32_precision() -> None:
    dy, x = torch.ones(1, 1).bfloat16(), torch.full((1, 1), 2.0**-12).bfloat16()
    out = torch.ones(1, 1)
    linear.weight_grad(dy, x, out=out)
    assert out.item() == 1 + 2.0**-12


# ------------------------------------------------------------------------------- attention


def definition(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """One segment, one query and one head at a time."""
    lq, lk, share = len(q), len(k), q.shape[1] // k.shape[1]
    outs, lses = [], []
    for i in range(lq):
        p = i + lk - lq
        visible = [
            j
            for j in range(lk)
            if (not causal or j <= p)
            and (window is None or (j > p - window and (causal or j < p + window)))
        ]
        for head in range(q.shape[1]):
            keys, values = k[visible, head // share], v[visible, head // share]
            scores = keys @ q[i, head] * scale
            outs.append(scores.softmax(0) @ values)
            lses.append(scores.logsumexp(0) if visible else torch.tensor(-torch.inf))
    return torch.stack(outs).view(lq, q.shape[1], -1), torch.stack(lses).view(lq, -1)


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def arguments(lq: list[int], lk: list[int], **options: Any) -> dict[str, Any]:
    return {
        "cu_seqlens_q": packed(lq),
        "cu_seqlens_k": packed(lk),
        "max_seqlen_q": max(lq),
        "max_seqlen_k": max(lk),
        **options,
    }


ATTENTION_CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "causal": ([5], [5], {}),
    "bidirectional": ([5], [5], {"causal": False}),
    "packed": ([3, 1, 4], [3, 1, 4], {}),
    "empty segments": ([0, 3, 0, 2, 0], [0, 3, 0, 2, 0], {}),
    "decode": ([1, 1, 1], [4, 1, 7], {}),
    "chunk after a prefix": ([3, 2], [7, 2], {}),
    "more queries than keys": ([5, 2], [2, 0], {}),
    "no keys at all, seen from everywhere": ([2, 3], [0, 3], {"causal": False}),
    "keys without queries": ([0, 2], [3, 2], {}),
    "window": ([7], [7], {"window": 3}),
    "window of one": ([4], [4], {"window": 1}),
    "window, decode": ([1, 2], [6, 5], {"window": 2}),
    "window, both sides": ([6], [6], {"window": 2, "causal": False}),
    "scale": ([4], [4], {"scale": 0.7}),
}


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("case", ATTENTION_CASES.values(), ids=ATTENTION_CASES.keys())
def test_attention_equals_its_definition(
    case: tuple[list[int], list[int], dict[str, Any]], heads: int, kv_heads: int
) -> None:
    lq, lk, options = case
    q = random(sum(lq), heads, 6, seed=1).requires_grad_()
    k = random(sum(lk), kv_heads, 6, seed=2).requires_grad_()
    v = random(sum(lk), kv_heads, 5, seed=3).requires_grad_()
    grad = random(sum(lq), heads, 5, seed=4)
    out, lse = attention(q, k, v, **arguments(lq, lk, **options))
    assert out.shape == (sum(lq), heads, 5)
    assert not lse.requires_grad
    actual = torch.autograd.grad(out, (q, k, v), grad)

    rule = {"causal": True, "window": None, "scale": 6**-0.5} | options
    parts = [
        definition(*segment, **rule)
        for segment in zip(q.split(lq), k.split(lk), v.split(lk), strict=True)
        if len(segment[0])
    ]
    expected = torch.cat([part[0] for part in parts])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, torch.cat([part[1] for part in parts]).to(lse.dtype))
    for a, b in zip(actual, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 2}])
def test_uniform_hint_changes_nothing(options: dict[str, Any]) -> None:
    lengths = [4, 4, 4]
    q, k = (random(12, 4, 6, seed=1).requires_grad_(), random(12, 2, 6, seed=2).requires_grad_())
    v, grad = random(12, 2, 3, seed=3).requires_grad_(), random(12, 4, 3, seed=4)
    results = []
    for hint in (None, (3, 4)):
        out, lse = attention(q, k, v, **arguments(lengths, lengths, uniform=hint, **options))
        results.append((out, lse, *torch.autograd.grad(out, (q, k, v), grad)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_past_the_last_segment_give_zeros() -> None:
    q, k, v = (random(5, 2, 4, seed=i).requires_grad_() for i in range(3))
    out, lse = attention(q, k, v, **arguments([3], [3]))
    assert not out[3:].any()
    assert (lse[3:] == -torch.inf).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(not grad[3:].any() for grad in grads)


def test_backward_of_blocks_adds_up_to_the_whole() -> None:
    """With out and lse merged over two blocks of keys, as a ring does."""
    lq = [3, 2]
    q, grad = random(5, 4, 6, seed=1), random(5, 4, 5, seed=4)
    k, v = random(10, 2, 6, seed=2), random(10, 2, 5, seed=3)
    whole = arguments(lq, [6, 4], causal=False)
    out, lse = attention(q, k, v, **whole)
    expected = attention.backward(grad, q, k, v, out=out, lse=lse, **whole)
    # The first half of each segment's keys, then the second.
    rows = [torch.tensor([0, 1, 2, 6, 7]), torch.tensor([3, 4, 5, 8, 9])]
    half = arguments(lq, [3, 2], causal=False)
    blocks = [attention(q, k[i], v[i], **half) for i in rows]
    lses = torch.stack([block[1] for block in blocks])
    merged = lses.logsumexp(0)
    torch.testing.assert_close(merged, lse)
    shares = (lses - merged).exp().unsqueeze(-1)
    torch.testing.assert_close(sum(s * b[0] for s, b in zip(shares, blocks, strict=True)), out)
    dq = torch.zeros_like(q)
    for i in rows:
        parts = attention.backward(grad, q, k[i], v[i], out=out, lse=merged, **half)
        dq += parts[0]
        torch.testing.assert_close(parts[1], expected[1][i])
        torch.testing.assert_close(parts[2], expected[2][i])
    torch.testing.assert_close(dq, expected[0])


def test_attention_in_bf16_sums_in_float32() -> None:
    q, k, v = (random(9, 2, 8, seed=i, dtype=torch.bfloat16) for i in range(3))
    out, lse = attention(q, k, v, **arguments([9], [9]))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    exact, exact_lse = attention(q.double(), k.double(), v.double(), **arguments([9], [9]))
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, exact.bfloat16())


@pytest.mark.parametrize(
    ("heads", "options", "message"),
    [
        ((4, 3), {}, "3 kv heads do not divide 4 query heads"),
        ((4, 2), {"window": 0}, r"window is 0, must be at least 1 \(or None\)"),
        ((4, 2), {"uniform": (2, 3)}, r"uniform=\(2, 3\) means 6 rows .* got 4 and 4"),
        ((4, 2), {"cu_seqlens_k": packed([2, 2])}, "1 query segments but 2 key segments"),
        ((4, 2), {"cu_seqlens_q": packed([5])}, "query 5 and key 4, beyond the 4 and 4 rows"),
    ],
)
def test_attention_refuses(heads: tuple[int, int], options: dict[str, Any], message: str) -> None:
    q, k = torch.zeros(4, heads[0], 2), torch.zeros(4, heads[1], 2)
    with pytest.raises(ValueError, match=message):
        attention(q, k, k, **arguments([4], [4]) | options)


# --------------------------------------------------------------------------- vocabulary loss


@pytest.mark.parametrize("cuts", [[], [3], [0, 2, 7]], ids=["whole", "two", "with an empty shard"])
@pytest.mark.parametrize(("on_target", "on_all"), [(1.0, 0.0), (0.3, 0.1)])
def test_vocab_loss_partials_add_up(cuts: list[int], on_target: float, on_all: float) -> None:
    logits = random(5, 7).requires_grad_()
    labels = torch.tensor([0, 6, 3, 2, 4])
    grad = random(5, seed=9)
    edges = list(zip([0, *cuts], [*cuts, 7], strict=True))
    parts = [logits.detach()[:, a:b] for a, b in edges]
    maximum = torch.stack([vocab_loss.local_max(part) for part in parts]).amax(0)
    torch.testing.assert_close(maximum, logits.detach().amax(-1))
    sum_exp, target, total = sum(
        vocab_loss.partials(part, labels - a, maximum, smoothing=on_all > 0)
        for part, (a, _) in zip(parts, edges, strict=True)
    )
    loss = sum_exp.log() - on_target * target - on_all * total
    # The weights add up to 1: on_all on each of 7 classes.
    p = logits.log_softmax(-1)
    expected = -on_target * p.gather(1, labels[:, None])[:, 0] - on_all * p.sum(-1)
    torch.testing.assert_close(loss, expected.detach())
    (expected_grad,) = torch.autograd.grad(expected, logits, grad)
    for part, (a, b) in zip(parts, edges, strict=True):
        padded = torch.full((5, b - a + 2), 9.0, dtype=torch.float64)  # a row stride above V
        vocab_loss.backward(
            part,
            labels - a,
            maximum,
            sum_exp,
            grad,
            on_target=on_target,
            on_all=on_all,
            out=padded[:, : b - a],
        )
        torch.testing.assert_close(padded[:, : b - a], expected_grad[:, a:b])
        assert (padded[:, b - a :] == 9.0).all()


def test_vocab_loss_gradient_of_anything_in_logits_and_their_sum() -> None:
    """An entropy, a squared log-sum-exp and label terms per token, over two shards."""
    logits = random(5, 7).requires_grad_()
    labels = torch.tensor([0, 6, 3, 2, 4])
    weights = random(4, 5, seed=9)
    lse = logits.logsumexp(-1)
    p = logits.softmax(-1)
    loss = weights[0] * (lse - (p * logits).sum(-1)) + weights[1] * lse.square()
    loss = loss - weights[2] * logits.gather(1, labels[:, None])[:, 0] - weights[3] * logits.sum(-1)
    loss.sum().backward()
    assert logits.grad is not None
    maximum = vocab_loss.local_max(logits.detach())
    sum_exp = vocab_loss.partials(logits.detach(), labels, maximum, smoothing=False)[0]
    shift = (p * (logits - maximum[:, None])).sum(-1).detach()
    for a, b in ((0, 3), (3, 7)):
        out = torch.empty(5, b - a, dtype=torch.float64)
        vocab_loss.gradient(
            logits.detach()[:, a:b],
            labels - a,
            maximum,
            sum_exp,
            on_softmax=weights[0] * shift + 2 * weights[1] * lse.detach(),
            on_surprise=-weights[0],
            on_target=weights[2],
            on_all=weights[3],
            out=out,
        )
        torch.testing.assert_close(out, logits.grad[:, a:b])


def test_vocab_loss_backward_may_overwrite_the_logits() -> None:
    logits = random(3, 4, dtype=torch.float32).requires_grad_()
    labels = torch.tensor([1, 0, 3])
    F.cross_entropy(logits, labels, reduction="sum").backward()
    z = logits.detach().clone()
    maximum = vocab_loss.local_max(z)
    sum_exp = vocab_loss.partials(z, labels, maximum, smoothing=False)[0]
    vocab_loss.backward(
        z, labels, maximum, sum_exp, torch.ones(3), on_target=1.0, on_all=0.0, out=z
    )
    torch.testing.assert_close(z, logits.grad)


# ------------------------------------------------------------------------------ update rule


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_sums_past_gradients_and_decays_apart_from_them(momentum: float) -> None:
    rule = SGD(momentum=momentum)
    start = random(6)
    grads = [random(6, seed=step) for step in range(3)]
    value, state = start.clone(), rule.init(start)
    assert tuple(state) == rule.state_names == (("momentum",) if momentum else ())
    decayed, decayed_state = start.clone(), rule.init(start)
    expected = start
    for i, grad in enumerate(grads):
        kept, before = grad.clone(), decayed.clone()
        rule.update(value, grad, state, lr=0.1, weight_decay=0.0, step=i + 1)
        rule.update(decayed, grad, decayed_state, lr=0.1, weight_decay=0.5, step=i + 1)
        assert torch.equal(grad, kept)
        velocity = sum(momentum ** (i - j) * past for j, past in enumerate(grads[: i + 1]))
        expected = expected - 0.1 * velocity
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(decayed, before * 0.95 - 0.1 * velocity)
        if momentum:  # decoupled: the decay never enters the state
            assert torch.equal(decayed_state["momentum"], state["momentum"])


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_sgd_refuses(momentum: float) -> None:
    with pytest.raises(ValueError, match=f"SGD: momentum is {momentum}, must be at least 0"):
        SGD(momentum=momentum)
