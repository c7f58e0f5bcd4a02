"""Recomputed activations: the same gradients, bit for bit, from less memory."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel import DeferredGradients, Group, all_reduce
from mcore_parallel.recompute import recompute, recompute_output
from mcore_parallel.tensor import ColumnParallelLinear
from mcore_parallel.testing import RankPool
from mcore_parallel.testing.memory import kept_bytes

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
    ),
]


class Part(nn.Module):
    """Keeps its input, both inner activations and a mask drawn from torch's generator."""

    def __init__(self, size: int = 12) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.drop(self.down(torch.sin(self.up(x))))
        return out


def gradients(part: Part, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(7)
    y = run(x)
    torch.rand(3)  # whatever is drawn until the backward pass
    return list(torch.autograd.grad(y.square().sum(), [x, *part.parameters()]))


def twice(part: Part, x: Tensor) -> Tensor:
    return part(part(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nested", [False, True])
def test_gradients_are_bitwise_those_of_the_plain_call(nested: bool, device: str) -> None:
    """U27: masks are drawn from the same generator state; also where calls are nested."""
    part, x = Part().to(device), torch.randn(5, 12, device=device, requires_grad=True)
    inner: Callable[[Tensor], Tensor] = partial(recompute, part) if nested else part

    def run(x: Tensor) -> Tensor:
        return recompute(lambda x: part(inner(x)), x)

    plain = gradients(part, x, partial(twice, part))
    after = torch.rand(1, device=device)
    again = gradients(part, x, run)
    assert torch.equal(
        torch.rand(1, device=device), after
    )  # the second run draws nothing of its own
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


def test_only_inputs_are_kept() -> None:
    part, x = Part(), torch.randn(50, 12, requires_grad=True)
    y, plain = kept_bytes(lambda: twice(part, x))
    assert plain > 50 * 12 * 4 * 10
    y, kept = kept_bytes(lambda: recompute(partial(twice, part), x))
    assert kept == y.nbytes
    calls = part.calls
    y.sum().backward()
    assert part.calls == calls + 2


def test_the_second_run_stops_when_all_is_there() -> None:
    """What follows the last tensor that is kept is not run again: here the second part."""
    part, x = Part(), torch.randn(5, 12, requires_grad=True)
    reached = []

    def run(x: Tensor) -> Tensor:
        y: Tensor = part(x)
        reached.append(y.shape)
        return y

    recompute(run, x).sum().backward()
    assert (part.calls, len(reached)) == (2, 1)


def test_several_inputs_of_which_some_need_no_gradient() -> None:
    x, y = torch.randn(4, 3), torch.randn(3, 4, requires_grad=True)
    seen = []

    def product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((x.requires_grad, y.requires_grad))
        z = x @ y
        return z.sin(), z.cos()

    s, c = recompute(product, x, y)
    (grad,) = torch.autograd.grad((s * c).sum(), y)
    z = x @ y
    torch.testing.assert_close(grad, torch.autograd.grad((z.sin() * z.cos()).sum(), y)[0])
    assert seen == [(False, True)] * 2


def test_hooks_around_see_the_inputs_alone() -> None:
    part, x = Part(), torch.randn(5, 12, requires_grad=True)
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = recompute(part, x)
    assert [tensor.data_ptr() for tensor in seen] == [x.data_ptr()]
    y.sum().backward()


def test_without_gradients_nothing_is_kept_and_a_graph_may_be_used_twice() -> None:
    part, x = Part(), torch.randn(5, 12, requires_grad=True)
    with torch.no_grad():
        y, kept = kept_bytes(lambda: recompute(part, x))
    assert kept == y.nbytes
    y = recompute(part, x).sum()
    (once,) = torch.autograd.grad(y, x, retain_graph=True)
    (again,) = torch.autograd.grad(y, x)
    assert torch.equal(once, again)


def test_autocast_is_that_of_the_first_run() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    seen: list[torch.dtype] = []

    def run(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        seen.append(y.dtype)
        return y.sin()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = recompute(run, x)
    y.sum().backward()
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize("second", [(2, 3), (3,)])
def test_a_function_that_does_something_else_is_found(second: tuple[int, ...]) -> None:
    x = torch.randn(3, requires_grad=True)
    runs = iter([(3, 3), second])

    def run(x: Tensor) -> Tensor:
        total = x
        for size in next(runs):
            total = total.sin()[:size]
        return total

    y = recompute(run, x)
    with pytest.raises(RuntimeError, match="does not do the same twice"):
        y.sum().backward()


@pytest.mark.parametrize("call", [recompute, lambda fn, x: recompute_output(torch.exp, x, fn)])
def test_gradients_of_gradients_are_refused(call: Callable[..., Tensor]) -> None:
    x = torch.randn(3, requires_grad=True)
    y = call(torch.sin, x)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def test_an_output_is_made_again() -> None:
    """Every view of it that the user saves; what it saves besides is kept as ever."""
    x, w = torch.randn(60, 12, requires_grad=True), torch.randn(12, 3, requires_grad=True)

    def use(y: Tensor) -> Tensor:
        return (y @ w).sum() + (y[5:50, ::2].sin() * y.t()[:6, 5:50].t()).sum()

    y, plain = kept_bytes(lambda: use(norm(x)))
    grads = torch.autograd.grad(y, [x, w])
    y, kept = kept_bytes(lambda: recompute_output(norm, x, use))
    assert kept == plain - x.nbytes
    for one, other in zip(grads, torch.autograd.grad(y, [x, w]), strict=True):
        assert torch.equal(one, other)


def test_an_output_that_is_the_input_of_something_recomputed() -> None:
    part, x = Part(), torch.randn(50, 12, requires_grad=True)
    plain = gradients(part, x, lambda x: part(norm(x)))
    again = gradients(part, x, lambda x: recompute_output(norm, x, partial(recompute, part)))
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)
    y, kept = kept_bytes(lambda: recompute_output(norm, x, partial(recompute, part)))
    assert kept <= y.nbytes + 50 * 8  # and what the norm itself keeps: a number for each row


def test_an_output_that_its_user_changes_in_place() -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def use(y: Tensor) -> Tensor:
        z = y.sin().sum()  # saves what is made again
        return z + y.mul_(2)[1:].square().sum()  # and this what cannot be

    def call(y: Tensor) -> Tensor:
        return y.mul_(2)[1:].square().sum()

    plain = torch.autograd.grad(call(norm(x)), x)[0]
    assert torch.equal(torch.autograd.grad(recompute_output(norm, x, call), x)[0], plain)
    sin = torch.autograd.grad(norm(x).sin().sum(), x)[0]
    both = torch.autograd.grad(recompute_output(norm, x, use), x)[0]
    torch.testing.assert_close(both, plain + sin)


def test_an_output_is_made_again_under_the_same_autocast() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    seen: list[torch.dtype] = []

    def make(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        seen.append(y.dtype)
        return y

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = recompute_output(make, x, torch.sin)
    y.sum().backward()
    assert seen == [torch.bfloat16] * 2


def test_weight_gradients_may_come_later_still() -> None:
    """The backward pass of a zero-bubble schedule, split in two."""
    layer = ColumnParallelLinear(6, 5)
    nn.init.normal_(layer.weight)
    x = torch.randn(4, 6, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        y = layer(x.sin())
        assert isinstance(y, Tensor)
        return y.cos()

    plain = torch.autograd.grad(run(x).sum(), [x, layer.weight])
    deferred = DeferredGradients([layer.weight])
    y = recompute(run, x)
    with deferred.collect() as pending:
        y.sum().backward()
    assert layer.weight.grad is None
    deferred.compute(pending)
    assert x.grad is not None
    assert torch.equal(x.grad, plain[0])
    assert torch.equal(layer.weight.grad, plain[1])


# --- over ranks ---------------------------------------------------------------------------------


def spread_over(rows: int) -> tuple[bool, int, int]:
    """Are gradients equal bit for bit, and what a rank keeps with shares and without."""
    group = Group.world()
    torch.manual_seed(3)
    x = torch.randn(rows, 5, requires_grad=True)

    def run(spread: Group | None) -> Callable[[], Tensor]:
        # The inputs are results of other layers: nobody else keeps them.
        return lambda: recompute(
            torch.sin, recompute(torch.sin, x * 1, spread=spread), spread=spread
        )

    found, kept = [], []
    for spread in (None, group):
        y, size = kept_bytes(run(spread))
        kept.append(size - y.nbytes)
        found.append(torch.autograd.grad(y.sum(), x)[0])
    (plain,) = torch.autograd.grad((x * 1).sin().sin().sum(), x)
    same = all(torch.equal(grad, plain) for grad in found)
    return bool(all_reduce(torch.tensor(float(same)), group, "min")), kept[0], kept[1]


@pytest.mark.parametrize(("world", "rows"), [(2, 8), (3, 7)])
def test_inputs_are_spread_over_ranks(ranks: RankPool, world: int, rows: int) -> None:
    """Each rank keeps its part of the inputs, rounded up, and gathers them to run again."""
    for same, whole, share in ranks.run(spread_over, world, rows):
        assert same
        assert whole == 2 * rows * 5 * 4
        assert share == 2 * -(-rows * 5 // world) * 4
