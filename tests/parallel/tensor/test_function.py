"""`parallel_linear`: main gradients, frozen weights, injected products, and order of work."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel import Group, RngKey, initialise, param_specs
from mcore_parallel.protocols import LinearOp, TorchLinear
from mcore_parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    overlap,
    parallel_linear,
)
from mcore_parallel.testing import RankPool

T = 4


class Recorder:
    """A `LinearOp` that notes which product ran when."""

    amax_reduce: Callable[[Tensor], Tensor] | None = None

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.inner = TorchLinear()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.log.append("call")
        return self.inner(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        self.log.append("forward")
        return self.inner.forward(x, weight)

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        self.log.append("input gradient")
        return self.inner.input_grad(dy, weight)

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        self.log.append("weight gradient")
        return self.inner.weight_grad(dy, x, out)


def stack(linear: LinearOp | None, sequence_parallel: bool) -> nn.Sequential:
    group = Group.world()
    options: dict[str, Any] = {
        "group": group,
        "bias": True,
        "sequence_parallel": sequence_parallel,
        "linear": linear,
    }
    model = nn.Sequential(ColumnParallelLinear(3, 8, **options), RowParallelLinear(8, 3, **options))
    specs = param_specs(model, tp=group, sequence_parallel=sequence_parallel)
    initialise(dict(model.named_parameters()), specs, RngKey(1))
    return model


def my_input(sequence_parallel: bool) -> Tensor:
    x = torch.linspace(-1, 1, T * 3).view(T, 3)
    group = Group.world()
    return x.chunk(group.size)[group.rank].clone() if sequence_parallel else x


def accumulate(sequence_parallel: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gradients of 2 micro-batches: by autograd, by main_grad, and what autograd got then."""
    plain, fused = stack(None, sequence_parallel), stack(None, sequence_parallel)
    fired = []
    for name, param in fused.named_parameters():
        if name.endswith("weight"):
            param.main_grad = torch.ones(param.shape)
        param.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    for scale in (1.0, 3.0):
        for model in (plain, fused):
            model(my_input(sequence_parallel) * scale).square().sum().backward()
    assert sorted(fired) == sorted(2 * ["0.weight", "0.bias", "1.weight", "1.bias"])
    result = []
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        main = getattr(b, "main_grad", None)
        assert getattr(b, "grad_added_to_main", False) == (main is not None)
        result.append((a.grad, b.grad if main is None else main - 1.0, b.grad))
    return result


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_main_grad_takes_the_weight_gradients(
    ranks: RankPool, size: int, sequence_parallel: bool
) -> None:
    for per_rank in ranks.run(accumulate, size, sequence_parallel):
        for by_autograd, by_main, left_to_autograd in per_rank:
            torch.testing.assert_close(by_main, by_autograd)
            assert left_to_autograd.shape == by_main.shape


def test_anomaly_detection_sees_no_garbage() -> None:
    """What autograd is handed beside main_grad is not filled, unless somebody looks at it."""
    layer = ColumnParallelLinear(3, 4)
    layer.weight.main_grad = torch.zeros(4, 3)  # type: ignore[assignment]
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        layer(torch.ones(2, 3)).sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def test_main_grad_of_bf16_weights_keeps_float32_sums() -> None:
    """1 + 2⁻¹⁰ is lost in bf16; the buffer must keep what each micro-batch adds."""
    layer = ColumnParallelLinear(1, 1, dtype=torch.bfloat16)
    layer.weight.main_grad = torch.ones(1, 1)  # type: ignore[assignment]
    for _ in range(4):
        y = layer(torch.full((1, 1), 2.0**-10, dtype=torch.bfloat16))
        assert isinstance(y, Tensor)
        y.sum().backward()
    assert layer.weight.main_grad.item() == 1 + 4 * 2.0**-10


def test_tied_head_leaves_its_gradient_to_autograd() -> None:
    """The embedding adds to the same weight, so hooks must find the sum of both in `grad`."""
    table = VocabParallelEmbedding(5, 3)
    head = VocabParallelHead(3, 5, tied=True)
    table.weight.data.copy_(torch.linspace(-1, 1, 15).view(5, 3))
    table.weight.main_grad = torch.zeros(5, 3)  # type: ignore[assignment]
    head(table(torch.tensor([1, 4])), table.weight).square().sum().backward()
    dense = table.weight.detach().clone().requires_grad_()
    F.linear(F.embedding(torch.tensor([1, 4]), dense), dense).square().sum().backward()
    torch.testing.assert_close(table.weight.grad, dense.grad)
    assert not hasattr(table.weight, "grad_added_to_main")
    assert isinstance(table.weight.main_grad, Tensor)
    assert not table.weight.main_grad.any()


def frozen(sequence_parallel: bool) -> tuple[list[str], Tensor, Tensor]:
    log: list[str] = []
    full, model = stack(None, sequence_parallel), stack(Recorder(log), sequence_parallel)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("weight"))
    grads = []
    for one in (full, model):
        x = my_input(sequence_parallel).requires_grad_()
        one(x).square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert all(p.grad is None for n, p in model.named_parameters() if n.endswith("weight"))
    assert all(p.grad is not None for n, p in model.named_parameters() if n.endswith("bias"))
    return log, *grads


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_weights_cost_the_input_gradient_only(
    ranks: RankPool, sequence_parallel: bool
) -> None:
    for log, full, with_frozen in ranks.run(frozen, 2, sequence_parallel):
        torch.testing.assert_close(with_frozen, full)
        assert "weight gradient" not in log
        assert "input gradient" in log


def order(sequence_parallel: bool) -> list[str]:
    """What the backward of a column-parallel layer does, in order."""
    log: list[str] = []

    def noting(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any) -> Any:
            log.append(f"start {name}")
            work = start(*args)

            class Waited:
                def wait(self) -> None:
                    log.append(f"wait {name}")
                    work.wait()

            return Waited()

        return started

    patch = pytest.MonkeyPatch()
    with patch.context() as p:
        for name in ("all_gather_into", "all_reduce_", "reduce_scatter_into"):
            p.setattr(overlap, name, noting(name, getattr(overlap, name)))
        group = Group.world()
        x = my_input(sequence_parallel).requires_grad_()
        weight = torch.ones(2, 3, requires_grad=True)
        y = parallel_linear(
            x,
            weight,
            None,
            linear=Recorder(log),
            group=group,
            sequence_parallel=sequence_parallel,
        )
        log.clear()
        y.sum().backward()
    return log


def test_communication_runs_beside_the_products(ranks: RankPool) -> None:
    assert ranks.run(order, 2, False) == 2 * [
        ["input gradient", "start all_reduce_", "weight gradient", "wait all_reduce_"]
    ]
    assert ranks.run(order, 2, True) == 2 * [
        [
            "start all_gather_into",
            "input gradient",
            "start reduce_scatter_into",
            "wait all_gather_into",
            "weight gradient",
            "wait reduce_scatter_into",
        ]
    ]


BESIDE = {"all_gather_into": "input_grad", "reduce_scatter_into": "weight_grad"}


def watched(flags: Path, late: bool) -> tuple[set[str], list[Tensor]]:
    """The communications inside which products of rank 0 ran, and the gradients.

    Rank 0 says which it began before the product, rank 1 which it joined only afterwards, without
    losing patience; none ends before both have joined. late: the fault, to wait where one should
    only start; also what the gradients are without overlap.
    """
    group, patch, inside = Group.world(), pytest.MonkeyPatch(), set()

    def communicating(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            computing, deadline = flags / BESIDE[name], time.monotonic() + (0.2 if late else 60)
            while group.rank == 1 and not computing.exists() and time.monotonic() < deadline:
                time.sleep(0.002)
            if computing.exists() == (group.rank == 1):
                inside.add(name)
            work = start(*args)
            if late:
                work.wait()
            return work

        return noted

    def computing(name: str, product: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            if group.rank == 0:
                (flags / name).touch()
            return product(*args)

        return noted

    linear, generator = TorchLinear(), torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=generator).requires_grad_()
    x = torch.randn(64, 32, generator=generator).chunk(group.size)[group.rank].requires_grad_()
    options: dict[str, Any] = {"linear": linear, "group": group, "sequence_parallel": True}
    y = parallel_linear(x, weight, None, **options)
    with patch.context() as p:
        for name, product in BESIDE.items():
            p.setattr(overlap, name, communicating(name, getattr(overlap, name)))
            p.setattr(linear, product, computing(product, getattr(linear, product)))
        y.sin().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return inside, [x.grad, weight.grad]


def test_a_trace_shows_products_inside_communications(ranks: RankPool, tmp_path: Path) -> None:
    """And the numbers are, bit for bit, those without any overlap."""
    found = {}
    for late in (False, True):
        flags = tmp_path / str(late)
        flags.mkdir()
        found[late] = ranks.run(watched, 2, flags, late)
    assert [inside for inside, _ in found[False]] == [set(BESIDE)] * 2
    assert found[True][1][0] == set()
    for (_, ours), (_, theirs) in zip(*found.values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_one_process_calls_the_whole_operator() -> None:
    log: list[str] = []
    y = parallel_linear(
        torch.ones(2, 3),
        torch.ones(4, 3),
        torch.ones(4),
        linear=Recorder(log),
        group=Group.single(),
    )
    assert log == ["call"]
    assert torch.equal(y, torch.full((2, 4), 4.0))


@pytest.mark.parametrize("shape", [(3,), (0, 3), (2, 5, 3)])
def test_dimensions_in_front_are_restored(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(4, 3)
    y = parallel_linear(x, weight, None, linear=TorchLinear(), group=Group.single())
    torch.testing.assert_close(y, F.linear(x, weight))
