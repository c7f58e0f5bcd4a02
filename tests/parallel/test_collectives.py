import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import (
    Group,
    all_gather,
    all_gather_into,
    all_gather_object,
    all_reduce,
    all_reduce_,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    copy_to_group,
    exchange,
    gather_from_group,
    gather_sequence,
    receive_into,
    reduce_from_group,
    reduce_scatter,
    reduce_scatter_into,
    reduce_scatter_sequence,
    scatter_to_group,
    send_to,
)
from mcore_parallel.testing import RankPool

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
MOVED = (*DTYPES, torch.bool, torch.uint16, torch.float8_e4m3fn)


def inputs(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return the input of every rank: small whole numbers, exact in any dtype."""
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randint(0, 3, shape, generator=generator).to(dtype) for _ in range(size)]


def same(found: Tensor, expected: Tensor, *given: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.double(), expected.double()), (found, expected)
    for x in given:
        assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


# --- plain ------------------------------------------------------------------------------------


def check_reductions() -> None:
    g = Group.world()
    for dtype in DTYPES:
        xs = inputs(g.size, (2 * g.size, 3), dtype)
        x = xs[g.rank]
        before = x.clone()
        total = sum(xs[1:], start=xs[0])
        same(all_reduce(x, g), total, x)
        same(all_reduce(x, g, "max"), torch.stack(xs).amax(0), x)
        same(all_reduce(x, g, "min"), torch.stack(xs).amin(0), x)
        if dtype.is_floating_point:
            same(all_reduce(x, g, "avg"), total / g.size, x)
        same(reduce_scatter(x, g), total.chunk(g.size)[g.rank], x)
        wide = x.t()  # not contiguous, and cut along the last dimension
        for dim in (1, -1):
            same(reduce_scatter(wide, g, dim), total.t().chunk(g.size, 1)[g.rank], x)
        assert torch.equal(x, before)
        assert all_reduce(x[:0], g).shape == (0, 3)
        assert reduce_scatter(x[:, :0], g).shape == (2, 0)
        scalar = all_reduce(x.sum(), g)
        assert scalar.shape == ()
        assert scalar.double() == total.double().sum()


def check_movement() -> None:
    g = Group.world()
    for dtype in MOVED:
        xs = inputs(g.size, (2, 3), dtype)
        x = xs[g.rank]
        before = x.clone()
        for dim in (0, 1, -1):
            same(all_gather(x, g, dim), cat(xs, dim), x)
            same(all_gather(x.t(), g, dim), cat([y.t() for y in xs], dim), x)
        for src in range(g.size):
            same(broadcast(x, src, g), xs[src], x)
            same(broadcast(x.t(), src, g), xs[src].t(), x)
        assert torch.equal(x.view(torch.uint8), before.view(torch.uint8))
        assert all_gather(x[:0], g).shape == (0, 3)
        assert broadcast(x[:0], 0, g).shape == (0, 3)


def cat(xs: list[Tensor], dim: int) -> Tensor:
    return torch.cat([x.double() for x in xs], dim).to(xs[0].dtype)


def splits_between(size: int) -> list[list[int]]:
    """Return rows that rank s sends to rank r: uneven, and often none."""
    return [[(2 * s + r) % 3 for r in range(size)] for s in range(size)]


def check_all_to_all() -> None:
    g = Group.world()
    rows = splits_between(g.size)
    for dtype in MOVED:
        xs = [inputs(g.size, (sum(rows[s]), 2), dtype)[s] for s in range(g.size)]
        x, sent = xs[g.rank], rows[g.rank]
        received = [rows[s][g.rank] for s in range(g.size)]
        parts = [torch.split(xs[s].double(), rows[s])[g.rank] for s in range(g.size)]
        same(all_to_all(x, g, received, sent), torch.cat(parts).to(dtype), x)
        even = inputs(g.size, (2 * g.size, 2), dtype)
        parts = [y.double().chunk(g.size)[g.rank] for y in even]
        same(all_to_all(even[g.rank], g), torch.cat(parts).to(dtype), even[g.rank])
    nothing = all_to_all(torch.zeros(0, 3), g, [0] * g.size, [0] * g.size)
    assert nothing.shape == (0, 3)
    assert all_to_all(torch.zeros(g.size, 0), g).shape == (g.size, 0)


def check_objects_and_buffers() -> None:
    g = Group.world()
    assert all_gather_object({"rank": g.rank}, g) == [{"rank": r} for r in range(g.size)]
    for src in range(g.size):
        assert broadcast_object(("from", g.rank), src, g) == ("from", src)
    barrier(g)

    xs = inputs(g.size, (2 * g.size,), torch.float32)
    total = sum(xs[1:], start=xs[0])
    x = xs[g.rank].clone()
    all_reduce_(x, g).wait()
    assert torch.equal(x, total)
    x = xs[g.rank].clone()
    all_reduce_(x, g, "max").wait()
    assert torch.equal(x, torch.stack(xs).amax(0))
    out = torch.empty(2)
    reduce_scatter_into(out, xs[g.rank], g).wait()
    assert torch.equal(out, total.view(g.size, 2)[g.rank])
    whole = torch.zeros(g.size, 2)
    whole[g.rank] = out
    all_gather_into(whole, whole[g.rank], g).wait()  # from its own slice of the result
    assert torch.equal(whole.view(-1), total)
    right, left = (g.rank + 1) % g.size, (g.rank - 1) % g.size
    for dtype in MOVED:
        got = torch.zeros(2, 3).to(dtype)
        xs = inputs(g.size, (2, 3), dtype)
        works = [send_to(xs[g.rank], right, g), receive_into(got, left, g)]
        for work in works:
            work.wait()
        same(got, xs[left])


@pytest.mark.parametrize("size", [2, 3])
def test_results_are_those_of_one_process_and_inputs_stay(ranks: RankPool, size: int) -> None:
    for check in (check_reductions, check_movement, check_all_to_all, check_objects_and_buffers):
        ranks.run(check, size)


# --- with gradients ---------------------------------------------------------------------------

Function = Callable[[Tensor, Group], Tensor]
Reference = Callable[[list[Tensor]], list[Tensor]]  # every rank's output from every rank's input


class Case:
    """A function, what it computes seen from outside, and who counts the loss of its output.

    shared_input: all ranks pass the same tensor. shared_output: all ranks get, and use, the same.
    """

    def __init__(
        self,
        function: Function,
        reference: Reference,
        *,
        shared_input: bool = False,
        shared_output: bool = False,
    ) -> None:
        self.function, self.reference = function, reference
        self.shared_input, self.shared_output = shared_input, shared_output


def cases(size: int, dim: int) -> dict[str, Case]:
    rows = splits_between(size)
    columns = [[rows[s][r] for s in range(size)] for r in range(size)]

    def total(xs: list[Tensor]) -> Tensor:
        return sum(xs[1:], start=xs[0])

    def exchanged(xs: list[Tensor]) -> list[Tensor]:
        parts = [torch.split(x, rows[s]) for s, x in enumerate(xs)]
        return [torch.cat([parts[s][r] for s in range(size)]) for r in range(size)]

    return {
        "copy": Case(copy_to_group, lambda xs: xs, shared_input=True),
        "reduce": Case(reduce_from_group, lambda xs: [total(xs)] * size, shared_output=True),
        "gather": Case(
            lambda x, g: gather_from_group(x, g, dim),
            lambda xs: [torch.cat(xs, dim)] * size,
            shared_output=True,
        ),
        "scatter": Case(
            lambda x, g: scatter_to_group(x, g, dim),
            lambda xs: list(xs[0].chunk(size, dim)),
            shared_input=True,
        ),
        "gather_sequence": Case(
            lambda x, g: gather_sequence(x, g, dim), lambda xs: [torch.cat(xs, dim)] * size
        ),
        "reduce_scatter_sequence": Case(
            lambda x, g: reduce_scatter_sequence(x, g, dim),
            lambda xs: list(total(xs).chunk(size, dim)),
        ),
        "exchange": Case(
            lambda x, g: exchange(x, g, columns[g.rank], rows[g.rank]),
            exchanged,
        ),
    }


def case_inputs(name: str, case: Case, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    rows = [sum(row) for row in splits_between(size)]
    shapes = [(rows[r], 3) if name == "exchange" else (2 * size, 2 * size) for r in range(size)]
    xs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    xs = [xs[0]] * size if case.shared_input else xs
    return [x.clone().requires_grad_() for x in xs]


def weighted(y: Tensor, rank: int) -> Tensor:
    """Return a loss that tells ranks and elements apart."""
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y) + rank
    return (weights * y**3).sum()


def check_gradients(dim: int) -> None:
    g = Group.world()
    for name, case in cases(g.size, dim).items():
        xs = case_inputs(name, case, g.size)
        expected, expected_second = reference_gradients(case, xs)
        x = case_inputs(name, case, g.size)[g.rank]
        # Used twice, once on something computed, so that gradients have to add up.
        y = case.function(x, g) + case.function(x * x, g)
        loss = weighted(y, 0 if case.shared_output else g.rank)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.testing.assert_close(first, expected[g.rank], rtol=1e-12, atol=1e-12, msg=name)
        before = first.detach().clone()
        (second,) = torch.autograd.grad((first**2).sum(), x)
        torch.testing.assert_close(
            second, expected_second[g.rank], rtol=1e-12, atol=1e-12, msg=f"second {name}"
        )
        assert torch.equal(first, before)


def reference_gradients(case: Case, xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return first and second order gradients of the sum of all losses, in one process."""
    leaves = xs[:1] if case.shared_input else xs
    given = [xs[0]] * len(xs) if case.shared_input else xs
    first_use, second_use = case.reference(given), case.reference([x * x for x in given])
    ys = [a + b for a, b in zip(first_use, second_use, strict=True)]
    if case.shared_output:
        ys = ys[:1]
    loss = torch.stack([weighted(y, r) for r, y in enumerate(ys)]).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([(f**2).sum() for f in first]).sum(), leaves)
    if case.shared_input:
        return [first[0]] * len(xs), [second[0]] * len(xs)
    return list(first), list(second)


@pytest.mark.parametrize(("size", "dim"), [(2, 0), (3, 1), (4, -1)])
def test_gradients_are_those_of_one_process(ranks: RankPool, size: int, dim: int) -> None:
    ranks.run(check_gradients, size, dim)


def check_group_survives_copies() -> None:
    module = torch.nn.Linear(1, 1)
    module.group = Group.world()  # type: ignore[assignment]
    assert copy.deepcopy(module).group is module.group
    gradients = []
    for _ in range(2):  # the same graph twice
        x = torch.ones(2, requires_grad=True)
        y = reduce_scatter_sequence(gather_sequence(x, Group.world()), Group.world())
        for _ in range(2):
            torch.autograd.backward(y.sum(), retain_graph=True)
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(gradients[0], torch.full((2,), 2.0 * dist.get_world_size()))
    assert torch.equal(gradients[0], gradients[1])


def test_a_graph_is_used_twice_and_modules_with_groups_are_copied(ranks: RankPool) -> None:
    ranks.run(check_group_survives_copies, 2)


# --- one rank, and errors ---------------------------------------------------------------------


def test_one_rank_gets_its_input_back_without_torch_distributed() -> None:
    g = Group.single()
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    one_argument: list[Callable[..., Any]] = [
        *(all_reduce, all_gather, reduce_scatter, all_to_all),
        *(copy_to_group, reduce_from_group, gather_sequence, reduce_scatter_sequence, exchange),
    ]
    for function in one_argument:
        assert function(x, g) is x
    assert broadcast(x, 0, g) is x
    assert gather_from_group(x, g, 1) is x
    assert scatter_to_group(x, g, 1) is x
    assert all_to_all(x, g, [3], [3]) is x
    assert all_gather_object("a", g) == ["a"]
    assert broadcast_object("a", 0, g) == "a"
    barrier(g)
    y, out = torch.arange(4.0), torch.zeros(4)
    for work in (all_reduce_(y, g), reduce_scatter_into(out, y, g), all_gather_into(out, y, g)):
        work.wait()
    assert torch.equal(out, y)
    assert torch.equal(y, torch.arange(4.0))


ARITHMETIC = Group(1, 4, (0, 1, 2, 3), None, "tp")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: all_reduce(x, ARITHMETIC), "'tp' of 4 ranks is arithmetic only"),
        (lambda x: all_gather_object(1, ARITHMETIC), "'tp' of 4 ranks is arithmetic only"),
        (
            lambda x: all_reduce(x, ARITHMETIC, "mean"),  # type: ignore[arg-type]
            "'mean' is none of sum, avg, max, min",
        ),
        (lambda x: reduce_scatter(x, ARITHMETIC), r"\(10, 3\) is 10, which 4 ranks .* 8 or 12"),
        (lambda x: scatter_to_group(x, ARITHMETIC, 1), r"\(10, 3\) is 3, which 4 .* valid are 4"),
        (lambda x: reduce_scatter_sequence(x, ARITHMETIC, 1), "valid are 4"),
        (lambda x: all_gather(x, ARITHMETIC, 2), "2 dimensions has no dimension 2"),
        (lambda x: all_gather(x.sum(), ARITHMETIC), "0 dimensions has no dimension 0"),
        (lambda x: all_to_all(x, ARITHMETIC), "10 rows cannot be shared equally by 4 ranks"),
        (lambda x: all_to_all(x, ARITHMETIC, [3] * 4, [3] * 4), "sum to 12, not to 10 rows"),
        (lambda x: all_to_all(x, ARITHMETIC, [3] * 4, [5, 5]), r"in_splits \[5, 5\] must be 4"),
        (lambda x: all_to_all(x, ARITHMETIC, [-1, 4, 4, 4], [4, 2, 2, 2]), "must be 4 numbers"),
        (
            lambda x: all_to_all(x, ARITHMETIC, [1] * 4, [4, 2, 2, 2]),
            "sends itself 2 rows but .* 1",
        ),
        (lambda x: all_to_all(x.sum(), ARITHMETIC), "a scalar has no rows"),
        (lambda x: broadcast(x, 4, ARITHMETIC), "has ranks 0 to 3, not 4"),
        (lambda x: broadcast_object(x, -1, ARITHMETIC), "has ranks 0 to 3, not -1"),
        (lambda x: send_to(x, 1, ARITHMETIC), "rank 1 of group 'tp' is myself"),
        (lambda x: all_reduce_(x.t(), ARITHMETIC), r"\(3, 10\) is not contiguous"),
        (lambda x: all_reduce_(x, ARITHMETIC, "avg"), "'avg' is none of sum, max, min"),
        (lambda x: reduce_scatter_into(x, x, ARITHMETIC), "out has 30 elements and x 30; over 4"),
        (lambda x: all_gather_into(x, x, ARITHMETIC), "out has 30 elements and x 30; over 4"),
        (lambda x: all_gather_into(x.half(), x, ARITHMETIC), "float16 and x torch.float32"),
    ],
)
def test_wrong_arguments_are_named_with_their_numbers(
    call: Callable[[Tensor], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(10, 3))
