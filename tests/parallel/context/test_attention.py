"""Attention over shared documents equals one process, whichever way keys or heads travel."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import Group, all_reduce
from mcore_parallel.context import (
    AllToAllAttention,
    DocumentPadding,
    HeadExchange,
    RingAttention,
    SequenceSplit,
    check_context_attention,
    context_attention,
    gather,
)
from mcore_parallel.context.blocks import Masking
from mcore_parallel.context.local import chunks_of, whole_lengths
from mcore_parallel.protocols import AttentionOp, TorchAttention
from mcore_parallel.testing import RankPool

D, DV = 4, 6
KINDS = [
    (2, "ring"),
    (2, "all-gather"),
    (2, "all-to-all"),
    (4, "ring"),
    (4, "all-gather"),
    (4, "all-to-all"),
    (4, "two-level"),
]
# Windows below, at and above the length of a chunk, and one that spans several.
MASKS = [(True, None), (False, None)]
MASKS += [(causal, window) for causal in (True, False) for window in (1, 2, 3, 5, 9, 40)]
PACKED = (8, 0, 16, 40)
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2},
}
UNIFORM = (24, 24)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Documents, heads and what a query may see."""

    lengths: tuple[int, ...] = PACKED
    heads: tuple[int, int] = (4, 2)
    masking: tuple[bool, int | None] = (True, None)
    scale: float | None = None
    trailing: int = 0
    dtype: torch.dtype = torch.float64

    @property
    def uniform(self) -> bool:
        return len(set(self.lengths)) == 1 and not self.trailing

    def bounds(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))

    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, of all ranks."""
        rows, (heads, kv_heads) = sum(self.lengths), self.heads
        shapes = [(heads, D), (kv_heads, D), (kv_heads, DV), (heads, DV)]
        generator = torch.Generator().manual_seed(7)
        return [
            torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for shape in shapes
        ]


def attend(
    op: AttentionOp, problem: Problem, qkv: list[Tensor], bounds: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=qkv[0].device)
    longest = max(b - a for a, b in pairwise(bounds))
    causal, window = problem.masking
    return op(
        *qkv,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        uniform=(len(problem.lengths), longest) if problem.uniform else None,
        causal=causal,
        window=window,
        scale=problem.scale,
    )


@functools.cache
def alone(problem: Problem) -> list[Tensor]:
    """Output, log-sum-exp and gradients in one process."""
    *qkv, grad = problem.inputs()
    qkv = [x.requires_grad_() for x in qkv]
    out, lse = attend(TorchAttention(), problem, qkv, problem.bounds())
    out.backward(grad)
    return [out.detach(), lse, *(x.grad for x in qkv if x.grad is not None)]


def shared(kind: str, problems: list[Problem], device: str = "cpu") -> list[list[Tensor]]:
    """The same of each problem, put together from the ranks of this world."""
    group = Group.world()
    op = context_attention(kind, group)
    found = []
    for problem in problems:
        split = SequenceSplit(bounds=problem.bounds(), size=group.size)
        *qkv, grad = (split.take(x, group.rank).to(device) for x in problem.inputs())
        extra = problem.trailing
        qkv = [torch.cat([x, x.new_full((extra, *x.shape[1:]), 3.0)]).requires_grad_() for x in qkv]
        grad = torch.cat([grad, grad.new_ones(extra, *grad.shape[1:])])
        out, lse = attend(op, problem, qkv, split.local_bounds)
        assert not lse.requires_grad
        out.backward(grad)
        results = [out.detach(), lse, *(x.grad for x in qkv if x.grad is not None)]
        assert len(results) == 5
        rows = len(results[0]) - extra
        assert not any(x[rows:].any() for x in (results[0], *results[2:]))  # of no document
        found.append([split.gather(x[:rows].contiguous(), group).cpu() for x in results])
    group.close()
    return found


def check(
    ranks: RankPool,
    kind: tuple[int, str],
    problems: list[Problem],
    device: str = "cpu",
) -> None:
    world, name = kind
    for found in ranks.run(shared, world, name, problems, device, device=device)[:1]:
        for problem, results in zip(problems, found, strict=True):
            tolerance = TOLERANCES[problem.dtype]
            names = ("out", "lse", "dq", "dk", "dv")
            for what, got, want in zip(names, results, alone(problem), strict=True):
                torch.testing.assert_close(
                    got, want, **tolerance, msg=lambda m, w=what, p=problem: f"{w} of {p}: {m}"
                )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_equals_one_process(ranks: RankPool, kind: tuple[int, str]) -> None:
    """U28's kind, at the operator: no gradient is off by a factor of cp."""
    problems = [
        Problem(masking=masking, lengths=lengths)
        for masking in (MASKS if kind[0] > 2 else MASKS[::3])
        for lengths in (PACKED, UNIFORM)
    ]
    problems += [
        Problem(heads=(8, 1), masking=(True, 3)),  # kv heads fewer than ranks
        Problem(heads=(4, 4), masking=(False, 5)),
        Problem(heads=(8, 4), scale=0.3),
        Problem(lengths=(8,)),  # chunks of one row on four ranks
        Problem(lengths=(8, 0), masking=(False, 2)),
        Problem(lengths=(0, 0)),
        Problem(trailing=3),
        Problem(trailing=1, masking=(False, 4)),
        Problem(dtype=torch.float32),
        Problem(dtype=torch.float32, masking=(False, 5), lengths=UNIFORM),
        Problem(dtype=torch.bfloat16, masking=(True, 9)),
    ]
    check(ranks, kind, problems)


UNEVEN = (3, 0, 9, 1, 17)


def filled_up(kind: str, problems: list[Problem]) -> list[list[Tensor]]:
    """Output and gradients of documents whose ends are filled up with large numbers."""
    group = Group.world()
    op, found = context_attention(kind, group), []
    for problem in problems:
        padding = DocumentPadding(lengths=problem.lengths, size=group.size)
        split, (causal, window) = padding.split, problem.masking
        *qkv, grad = problem.inputs()
        qkv = [split.take(padding.pad(x, 1e3), group.rank).requires_grad_() for x in qkv]
        cu_seqlens = torch.tensor(split.local_bounds, dtype=torch.int32)
        longest = int(cu_seqlens.diff().max())
        out, _ = op(
            *qkv,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=causal,
            window=window,
            sinks=None,
            lengths=problem.lengths,
        )
        out.backward(split.take(padding.pad(grad), group.rank))
        results = [out.detach(), *(x.grad for x in qkv if x.grad is not None)]
        whole = [split.gather(x, group) for x in results]
        added = torch.ones(split.num_rows, dtype=torch.bool)
        added[padding.rows()] = False
        assert not any(x[added].any() for x in whole[1:])
        found.append([padding.unpad(x) for x in whole])
    group.close()
    return found


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_that_fill_up_documents_are_seen_by_nobody(
    ranks: RankPool, kind: tuple[int, str]
) -> None:
    """Where tokens see later ones the rows after a document's end would be among them."""
    problems = [
        Problem(masking=masking, lengths=lengths, heads=heads)
        for lengths in (UNEVEN, (9, 9), (2,))
        for masking, heads in [
            *(((False, window), (4, 2)) for window in (None, 2, 9)),
            ((False, None), (8, 1)),
            ((True, None), (4, 2)),
        ]
    ]
    world, name = kind
    for problem, results in zip(
        problems, ranks.run(filled_up, world, name, problems)[0], strict=True
    ):
        out, _, *gradients = alone(problem)
        for got, want in zip(results, (out, *gradients), strict=True):
            torch.testing.assert_close(got, want, **TOLERANCES[torch.float64], msg=str(problem))


def test_lengths_that_do_not_fit_the_rows() -> None:
    for lengths in ((5, 9), (4,), (-1, 4)):
        with pytest.raises(ValueError, match=r"of \d documents in rows for \[4, 8\] of 2"):
            whole_lengths((range(2), range(2, 6)), 2, lengths)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_gpus_equal_one_process(ranks: RankPool, kind: tuple[int, str]) -> None:
    problems = [
        Problem(masking=masking, lengths=lengths)
        for masking in ((True, None), (False, None), (True, 9), (False, 5))
        for lengths in (PACKED, UNIFORM)
    ]
    check(ranks, kind, problems, device="cuda")


def isolated(kind: str, lengths: tuple[int, ...]) -> None:
    group = Group.world()
    op = context_attention(kind, group)
    for masking in ((True, None), (False, None), (True, 3), (False, 3)):
        problem = Problem(lengths=lengths, masking=masking)
        split = SequenceSplit(bounds=problem.bounds(), size=group.size)
        results = []
        for factor in (1.0, 100.0):
            whole = problem.inputs()
            for x in whole:
                x[problem.bounds()[1] : problem.bounds()[2]] *= factor
            *qkv, grad = (split.take(x, group.rank) for x in whole)
            qkv = [x.requires_grad_() for x in qkv]
            out, _ = attend(op, problem, qkv, split.local_bounds)
            out.backward(grad)
            results.append([out.detach(), *(x.grad for x in qkv if x.grad is not None)])
        start, stop = split.local_bounds[1:3]
        for before, after in zip(*results, strict=True):
            assert torch.equal(before[:start], after[:start])
            assert torch.equal(before[stop:], after[stop:])
            assert not torch.equal(before[start:stop], after[start:stop])
    group.close()


@pytest.mark.parametrize("kind", KINDS[3:], ids=str)
def test_packed_documents_do_not_see_each_other(ranks: RankPool, kind: tuple[int, str]) -> None:
    """U29's and U41's kind: outputs and gradients of the other documents change by exactly 0."""
    world, name = kind
    ranks.run(isolated, world, name, (8, 16, 24))


def layers(two_level: str) -> tuple[list[Tensor], list[Tensor]]:
    """Two layers of different kinds in one model: parameters' gradients, here and alone."""

    def run(ops: list[AttentionOp], x: Tensor, bounds: tuple[int, ...]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(2)
        weights = [
            torch.randn(8, 24, generator=generator, dtype=torch.float64).requires_grad_()
            for _ in ops
        ]
        problem = Problem(lengths=(16, 8))
        for op, weight in zip(ops, weights, strict=True):
            q, k, v = (x @ weight).unflatten(-1, (6, 4)).split(2, 1)
            out, _ = attend(op, problem, [q, k, v], bounds)
            x = x + out.flatten(1)
        x.square().sum().backward()
        return [weight.grad for weight in weights if weight.grad is not None]

    group = Group.world()
    split = SequenceSplit(bounds=(0, 16, 24), size=group.size)
    whole = torch.randn(24, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ops = [context_attention("ring", group), context_attention("all-to-all", group)]
    ops.append(context_attention("all-gather", group))
    ops.append(context_attention(two_level, group))
    mine = run(ops, split.take(whole, group.rank), split.local_bounds)
    want = run([TorchAttention()] * len(ops), whole, split.bounds)
    return [all_reduce(grad, group) for grad in mine], want


def test_layers_of_different_kinds_in_one_model(ranks: RankPool) -> None:
    """U28: parameters' gradients, summed over the group, are those of one process."""
    for mine, want in ranks.run(layers, 2, "two-level:1") + ranks.run(layers, 2, "two-level"):
        torch.testing.assert_close(mine, want)


class Counting(TorchAttention):
    """Counts the scores that it is asked for."""

    def __init__(self) -> None:
        self.scores: list[int] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        lengths = rest["cu_seqlens_q"].diff() * rest["cu_seqlens_k"].diff()
        self.scores.append(int(lengths.sum()))
        return super().__call__(q, k, v, **rest)


def count_work() -> tuple[list[int], int]:
    group, op = Group.world(), Counting()
    ring = RingAttention(group, op)
    problem = Problem(lengths=(64,))
    split = SequenceSplit(bounds=problem.bounds(), size=group.size)
    qkv = [split.take(x, group.rank) for x in problem.inputs()[:3]]
    attend(ring, problem, qkv, split.local_bounds)
    full = list(op.scores)
    attend(ring, replace(problem, masking=(True, 2)), qkv, split.local_bounds)
    return full, sum(op.scores[len(full) :])


def test_a_causal_ring_gives_every_rank_the_same_work_and_a_window_little(ranks: RankPool) -> None:
    found = ranks.run(count_work, 4)
    for full, windowed in found:
        assert full == [16 * 16, 16 * 8, 16 * 8, 16 * 8]
        # Two chunks of 8 queries with 8 keys each, and a corner of one or two keys before each.
        assert windowed <= 2 * (8 * 8 + 2 * 2)


def count_sent(kind: str, window: int | None) -> tuple[int, int]:
    """Elements that this rank sends, forward and backward."""
    group, sent = Group.world(), [0]
    send, move = dist.batch_isend_irecv, gather.all_to_all

    def counted_send(operations: list[dist.P2POp]) -> Any:
        sent[0] += sum(op.tensor.numel() for op in operations if op.op is dist.isend)
        return send(operations)

    def counted_move(x: Tensor, group: Group, out: list[int], into: list[int]) -> Tensor:
        sent[0] += (sum(into) - into[group.rank]) * x.shape[1]
        return move(x, group, out, into)

    problem = Problem(lengths=(64,), masking=(True, window))
    split = SequenceSplit(bounds=problem.bounds(), size=group.size)
    qkv = [split.take(x, group.rank).requires_grad_() for x in problem.inputs()[:3]]
    with (
        mock.patch.object(dist, "batch_isend_irecv", counted_send),
        mock.patch.object(gather, "all_to_all", counted_move),
    ):
        out, _ = attend(context_attention(kind, group), problem, qkv, split.local_bounds)
        forward, sent[0] = sent[0], 0
        out.sum().backward()
    return forward, sent[0]


def test_what_no_window_shows_is_not_sent(ranks: RankPool) -> None:
    row, block = 2 * (D + DV), 16 * 2 * (D + DV)
    assert ranks.run(count_sent, 4, "ring", None) == [(3 * block, 7 * block)] * 4
    # Both neighbours, where there are two; gradients go back the same way.
    near = [(block, 2 * block), (2 * block, 4 * block), (2 * block, 4 * block), (block, 2 * block)]
    assert ranks.run(count_sent, 4, "ring", 9) == near
    # Ranks 0 to 3 hold chunks 0 7, 1 6, 2 5, 3 4; each needs the last row of the chunks before.
    rows = [1, 2, 2, 1]
    found = ranks.run(count_sent, 4, "all-gather", 2)
    assert [forward for forward, _ in found] == [n * row for n in rows]
    assert sum(both for _, both in found) == 2 * sum(rows) * row


@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_ring_visits_every_rank_that_a_window_shows(size: int) -> None:
    """Without processes: pairs of ranks with a visible pair of positions, by brute force."""
    documents = (range(6), range(6, 6), range(6, 26))  # on each rank
    ranks = tuple(range(size))
    for causal in (True, False):
        for window in (1, 2, 4, 5, 7, 13, 40):
            for rank in ranks:
                plan = RingAttention(Group(rank, size, ranks)).plan(
                    documents,
                    tuple(len(document) * size for document in documents),
                    Masking(causal, window),
                    26,
                    torch.device("cpu"),
                )
                seen = [
                    (rank if step.take is None else (rank - number) % size if plan.passed_on
                     else step.take)
                    for number, step in enumerate(plan.steps) if step.calls
                ]  # fmt: skip
                assert sorted(seen) == shown(rank, size, documents, causal, window)


def shown(
    rank: int, size: int, documents: tuple[range, ...], causal: bool, window: int
) -> list[int]:
    found = set()
    for document in documents:
        held = [
            {i for chunk in chunks_of(document, other, size) for i in chunk.positions}
            for other in range(size)
        ]
        for i in held[rank]:
            visible = range(i - window + 1, i + 1 if causal else i + window)
            found |= {other for other in range(size) if held[other] & set(visible)}
    return sorted(found)


def test_parameters_go_to_the_ranks_as_their_heads_do() -> None:
    """Eight heads are dealt out over four ranks, two groups are shared by pairs of them."""
    heads, groups = torch.arange(8), torch.arange(2).view(1, 2)
    for rank in range(4):
        exchange = HeadExchange(Group(rank, 4, (0, 1, 2, 3)))
        assert exchange.my_heads(heads).tolist() == [2 * rank, 2 * rank + 1]
        assert exchange.my_heads(groups, dim=1).tolist() == [[rank // 2]]


class Tracked:
    """A communication that counts as under way until somebody waits for it."""

    def __init__(self, work: Any, under_way: set[int]) -> None:
        self.work, self.under_way = work, under_way
        under_way.add(id(self))

    def wait(self) -> None:
        self.under_way.discard(id(self))
        self.work.wait()


class Observed(TorchAttention):
    """Notes how many sends and receives are under way whenever it is asked to compute."""

    def __init__(self) -> None:
        self.under_way: set[int] = set()
        self.seen: list[int] = []

    def __call__(self, *tensors: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        self.seen.append(len(self.under_way))
        return super().__call__(*tensors, **rest)

    def backward(self, *tensors: Tensor, **rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.seen.append(len(self.under_way))
        return super().backward(*tensors, **rest)


def observe() -> tuple[list[int], list[int]]:
    group, op = Group.world(), Observed()
    start = dist.batch_isend_irecv

    def tracked(operations: list[dist.P2POp]) -> list[Tracked]:
        return [Tracked(work, op.under_way) for work in start(operations)]

    problem = Problem(lengths=(64,))
    split = SequenceSplit(bounds=problem.bounds(), size=group.size)
    qkv = [split.take(x, group.rank).requires_grad_() for x in problem.inputs()[:3]]
    with mock.patch.object(dist, "batch_isend_irecv", tracked):
        out, _ = attend(RingAttention(group, op), problem, qkv, split.local_bounds)
        forward, op.seen = op.seen, []
        out.sum().backward()
    assert not op.under_way
    return forward, op.seen


def test_blocks_travel_while_others_are_computed(ranks: RankPool) -> None:
    """A send and a receive each; backward the gradients follow one block behind."""
    assert ranks.run(observe, 4) == [([2, 2, 2, 0], [2, 4, 4, 2])] * 4


def test_a_group_of_one_is_the_operator() -> None:
    problem = Problem(lengths=(5, 3))
    for kind in ("ring", "all-gather", "all-to-all"):
        op = context_attention(kind, Group.single())
        out, lse = attend(op, problem, problem.inputs()[:3], problem.bounds())
        want = alone(problem)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])


def test_what_cannot_be_shared_is_refused_in_one_line() -> None:
    four = Group(0, 4, (0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"6 query and 2 kv heads .* over 4 ranks: use 2 or 6"):
        check_context_attention("all-to-all", 4, num_heads=6, num_kv_heads=2)
    with pytest.raises(ValueError, match=r"12 query and 3 kv heads .* over 4 ranks: use 3 or 6"):
        check_context_attention("two-level:4", 8, num_heads=12, num_kv_heads=3)
    check_context_attention("two-level", 8, num_heads=12, num_kv_heads=2)
    check_context_attention("all-to-all", 6, num_heads=12, num_kv_heads=3)
    check_context_attention("ring", 5, num_heads=3, num_kv_heads=3)
    with pytest.raises(ValueError, match="did you mean 'all-gather'"):
        context_attention("allgather", four)
    with pytest.raises(
        ValueError, match=r"'two-level:3' over cp=4 ranks: inner must be one of 1, 2, 4"
    ):
        context_attention("two-level:3", four)
    with pytest.raises(ValueError, match="'ring' has no inner ranks, got 2: use two-level:2"):
        context_attention("ring:2", four)
    with pytest.raises(ValueError, match="no rings over every 3th"):
        RingAttention(four, stride=3)
    odd = Problem(lengths=(4, 3))
    inputs = odd.inputs()[:3]
    for op in (RingAttention(four), AllToAllAttention(four), context_attention("all-gather", four)):
        with pytest.raises(ValueError, match=r"document 1 has 3 rows .* two equal chunks: 2 or 4"):
            attend(op, odd, inputs, odd.bounds())
        with pytest.raises(ValueError, match="documents end at row 8, and there are 7 rows"):
            attend(op, odd, inputs, (0, 8))
    with pytest.raises(ValueError, match="window is 0, must be at least 1"):
        attend(RingAttention(four), Problem(masking=(True, 0)), Problem().inputs()[:3], (0, 64))
    q, k, v = inputs
    bounds = [torch.tensor(x, dtype=torch.int32) for x in ((0, 4, 6), (0, 2, 6))]
    with pytest.raises(ValueError, match="must be the same documents"):
        RingAttention(four)(
            q,
            k,
            v,
            cu_seqlens_q=bounds[0],
            cu_seqlens_k=bounds[1],
            max_seqlen_q=4,
            max_seqlen_k=4,
        )


def test_bounds_made_in_inference_mode() -> None:
    """They have no version: what was planned for them is not taken for what they are later."""
    exchange = HeadExchange(Group(rank=0, size=2, ranks=(0, 1)))
    with torch.inference_mode():
        bounds = torch.tensor([0, 4, 8])
        first = exchange.widen((bounds, bounds), None, (8, 8), bounds.device)
        bounds[1] = 2
        second = exchange.widen((bounds, bounds), None, (8, 8), bounds.device)
    assert first.cu_seqlens.tolist() == [0, 8, 16]
    assert second.cu_seqlens.tolist() == [0, 4, 16]
    assert not torch.equal(first.order, second.order)
