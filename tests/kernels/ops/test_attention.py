"""Attention beyond the conformance suite: hints, errors, random packings, memory."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_kernels import OPERATORS, AttentionOp, Target, resolve
from mcore_kernels.ops.attention.base import Segments, Visibility, merge_sinks, sinks_grad
from mcore_kernels.ops.attention.sdpa import SdpaAttention
from mcore_kernels.testing import spec

NAMES = [one.name for one in OPERATORS["attention"].implementations if not one.refusal(Target())]


def op(name: str) -> AttentionOp:
    return resolve("attention", target=Target(), require=name)  # type: ignore[return-value]


def ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def heads(rows: int, count: int = 2) -> torch.Tensor:
    return torch.randn(rows, count, 8)


@pytest.mark.parametrize("name", NAMES)
def test_uniform_reads_no_lengths(name: str) -> None:
    """The lengths would have to be read back from a device, which waits for it."""
    q, k, v = heads(12), heads(12), heads(12)
    unreadable = torch.full((4,), -1, dtype=torch.int32)
    packed, _ = op(name)(
        q,
        k,
        v,
        cu_seqlens_q=unreadable,
        cu_seqlens_k=unreadable,
        max_seqlen_q=4,
        max_seqlen_k=4,
        uniform=(3, 4),
    )
    expected, _ = spec.attention(
        q, k, v, cu_seqlens_q=ends([4, 4, 4]), cu_seqlens_k=ends([4, 4, 4])
    )
    torch.testing.assert_close(packed, expected)


def test_equal_neighbours_run_together() -> None:
    """A batch of documents of one length is one call of the kernel, not one per document."""
    q = heads(19)
    segments = Segments(
        cu_seqlens_q=ends([4, 4, 4, 3, 4]),
        cu_seqlens_k=ends([4, 4, 4, 3, 4]),
        max_seqlen_q=4,
        max_seqlen_k=4,
        uniform=None,
    )
    plan = SdpaAttention().plan(q, q, segments, Visibility(causal=True, window=None, scale=1.0))
    assert [(run.count, run.lq, run.start_q) for run in plan.runs] == [
        (3, 4, 0),
        (1, 3, 12),
        (1, 4, 15),
    ]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=5),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 8),
    name=st.sampled_from(NAMES),
)
def test_any_packing(
    lengths: list[tuple[int, int]], causal: bool, window: int | None, name: str
) -> None:
    lengths_q, lengths_k = [a for a, _ in lengths], [b for _, b in lengths]
    generator = torch.Generator().manual_seed(1)

    def make(rows: int, count: int) -> torch.Tensor:
        return torch.randn(rows, count, 4, generator=generator).double().requires_grad_()

    q, k, v = make(sum(lengths_q), 4), make(sum(lengths_k), 2), make(sum(lengths_k), 2)
    where = {"cu_seqlens_q": ends(lengths_q), "cu_seqlens_k": ends(lengths_k)}
    out, lse = op(name)(
        q, k, v, **where, max_seqlen_q=6, max_seqlen_k=6, causal=causal, window=window
    )
    expected, expected_lse = spec.attention(q, k, v, **where, causal=causal, window=window)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert not lse.requires_grad
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    total = expected.square().sum() + 0.0 * q.sum()  # has a graph even where nothing is seen
    wanted = torch.autograd.grad(total, (q, k, v), materialize_grads=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": heads(6, 3), "v": heads(6, 3)},
            "kv heads must divide that of query heads, got 3 and",
        ),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"uniform": (2, 4)}, r"uniform=\(2, 4\) means 8 rows, got 6 of q and 6 of k"),
        ({"cu_seqlens_k": ends([6])}, "cu_seqlens_q has 2 segments, cu_seqlens_k has 1"),
        ({"cu_seqlens_q": ends([2, 5])}, "end at rows 7 and 6, beyond the 6 of q or the 6 of k"),
    ],
)
def test_arguments_that_do_not_fit(name: str, change: dict, message: str) -> None:
    arguments = {
        "q": heads(6, 4),
        "k": heads(6),
        "v": heads(6),
        "cu_seqlens_q": ends([2, 4]),
        "cu_seqlens_k": ends([2, 4]),
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        op(name)(**arguments)


def test_sdpa_is_torchs_own_attention() -> None:
    """The same kernel, so the same bits and the same speed."""
    q, k, v = heads(24, 4), heads(24), heads(24)
    out, _ = op("sdpa")(
        q,
        k,
        v,
        cu_seqlens_q=ends([12, 12]),
        cu_seqlens_k=ends([12, 12]),
        max_seqlen_q=12,
        max_seqlen_k=12,
        uniform=(2, 12),
    )
    batched = [x.view(2, 12, -1, 8).transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *batched, is_causal=True, enable_gqa=True
    )
    assert torch.equal(out, expected.transpose(1, 2).reshape(24, 4, 8))


@pytest.mark.parametrize("name", NAMES)
def test_sinks_are_merged_behind_blocks_of_keys(name: str) -> None:
    """As ring attention does it: the sink comes once, after the keys of all blocks."""
    attend = op(name)
    q, k, v = torch.randn(3, 6, 2, 8, dtype=torch.float64).unbind(0)
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)
    queries = {"cu_seqlens_q": ends([6]), "max_seqlen_q": 6, "causal": False}
    whole = {**queries, "cu_seqlens_k": ends([6]), "max_seqlen_k": 6}
    out, lse = attend(q, k, v, **whole, sinks=sinks)
    half = {**queries, "cu_seqlens_k": ends([3]), "max_seqlen_k": 3}
    (one, lse_one), (two, lse_two) = (attend(q, k[i : i + 3], v[i : i + 3], **half) for i in (0, 3))
    both = torch.logaddexp(lse_one, lse_two)
    merged = (lse_one - both).exp().unsqueeze(-1) * one + (lse_two - both).exp().unsqueeze(-1) * two
    merged, lse_merged = merge_sinks(merged, both, sinks.detach())
    torch.testing.assert_close(merged, out.detach())
    torch.testing.assert_close(lse_merged, lse)
    grad = torch.randn_like(out)
    (wanted,) = torch.autograd.grad(out, sinks, grad)
    torch.testing.assert_close(sinks_grad(grad, merged, lse_merged, sinks.detach()), wanted)


def test_caps_and_sinks_that_cannot_be() -> None:
    q = torch.ones(3, 2, 8)
    bounds = ends([3])
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 3, "max_seqlen_k": 3}
    attend = op("reference")
    with pytest.raises(ValueError, match=r"softcap must be positive, got 0.0"):
        attend(q, q, q, **lengths, softcap=0.0)
    with pytest.raises(ValueError, match=r"one per query head, \[2\], got \[3\]"):
        attend(q, q, q, **lengths, sinks=torch.ones(3))
