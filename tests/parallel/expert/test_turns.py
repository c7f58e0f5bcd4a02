"""Two passes that take turns: who computes when, what each sees, and how faults end both."""

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group, run_schedule
from mcore_parallel.expert import Turns
from mcore_parallel.pipeline import PipelineError, one_f_one_b
from mcore_parallel.recompute import recompute


class Noted(torch.autograd.Function):
    """A computation whose backward pass is told of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.then()
        return grad, None


class Layers:
    """A stage of some layers that wait once each, as expert layers do."""

    def __init__(self, turns: Turns, count: int = 2) -> None:
        self.turns, self.count = turns, count
        self.seen: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def layer(self, x: Tensor, name: str) -> Tensor:
        self.note(f"F{name} starts")
        x = Noted.apply(x * self.weight, lambda: self.note(f"B{name} ends"))  # type: ignore[no-untyped-call]
        mark = self.turns.mark(x)
        self.turns.forward_waits()
        self.note(f"F{name} ends")
        x = self.turns.after(mark, x)
        return Noted.apply(x, lambda: self.note(f"B{name} starts"))  # type: ignore[no-untyped-call]

    def note(self, what: str) -> None:
        self.seen.append(what)
        self.threads.add(threading.current_thread())

    def __call__(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        for i in range(self.count):
            x = self.layer(x, f"{int(x.detach())}.{i}" if i == 0 else f".{i}")
        return x.sum()


def run(stage: Any, turns: Turns | None, count: int = 2) -> list[Tensor]:
    numbers = [torch.tensor(float(i + 1)) for i in range(count)]
    actions = one_f_one_b(1, count, paired=turns is not None)[0]
    return run_schedule(actions, stage, numbers, Group.single(), turns=turns)


def test_each_goes_on_where_the_other_waits() -> None:
    stage = Layers(Turns())
    losses = run(stage, stage.turns)
    assert [float(loss) for loss in losses] == [1.0, 2.0]
    assert stage.seen == [
        *("F1.0 starts", "F1.0 ends", "F.1 starts", "F.1 ends"),
        *("B.1 starts", "F2.0 starts", "B.1 ends", "B1.0 starts", "F2.0 ends", "F.1 starts"),
        *("B1.0 ends", "F.1 ends"),
        *("B.1 starts", "B.1 ends", "B2.0 starts", "B2.0 ends"),
    ]
    assert len(stage.threads) == 2
    alone = Layers(Turns())
    assert run(alone, None) == losses
    assert stage.weight.grad == alone.weight.grad


def test_a_backward_pass_that_waits_for_nothing_is_followed_by_the_forward_pass() -> None:
    weight, seen = torch.nn.Parameter(torch.ones(())), []

    def stage(x: Tensor, hidden: Tensor | None) -> Tensor:
        seen.append(f"F{int(x)} in {threading.current_thread().name}")
        out = Noted.apply(x * weight, lambda: seen.append(f"B{int(x)}"))  # type: ignore[no-untyped-call]
        return cast(Tensor, out)

    run(stage, Turns())
    assert seen == ["F1 in MainThread", "B1", "F2 in MainThread", "B2"]
    assert weight.grad == 3


def test_the_forward_pass_sees_autocast_and_records_its_graph() -> None:
    turns, found = Turns(), []

    def stage(x: Tensor, hidden: Tensor | None) -> Tensor:
        found.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        mark = turns.mark(x.requires_grad_())
        turns.forward_waits()
        return turns.after(mark, x * 2).sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(stage, turns)
    assert found == [(True, True)] * 2


def test_what_is_run_again_does_not_wait() -> None:
    """Random numbers are those of the first run then, and the other pass would draw of them."""
    turns, drawn = Turns(), []

    def layer(x: Tensor) -> Tensor:
        noise = torch.rand(())
        drawn.append(float(noise))
        mark = turns.mark(x)
        turns.forward_waits()
        return turns.after(mark, x * noise)

    def stage(x: Tensor, hidden: Tensor | None) -> Tensor:
        x = x.requires_grad_()
        return recompute(layer, recompute(layer, x)).sum()

    losses = []
    for beside in (None, turns):
        torch.manual_seed(1)
        losses.append([float(loss) for loss in run(stage, beside, 3)])
    assert losses[0] == losses[1]
    assert len(set(drawn)) == 6  # each is drawn again in the second run, and nothing else is


@pytest.mark.parametrize(("fails", "action"), [("F.1 starts", "F"), ("B1.0 starts", "B")])
def test_a_fault_of_either_ends_both(fails: str, action: str) -> None:
    stage = Layers(Turns())
    note = stage.note

    def failing(what: str) -> None:
        note(what)
        if what == fails and "F2.0 starts" in stage.seen:
            raise OSError("out of luck")

    stage.note = failing  # type: ignore[method-assign]
    before = threading.active_count()
    number = {"F": 1, "B": 0}[action]
    with pytest.raises(PipelineError, match=f"{action} of chunk 0, micro-batch {number}") as error:
        run(stage, stage.turns)
    assert error.value.reason == "OSError: out of luck"
    assert threading.active_count() == before
    assert "F.1 ends" not in stage.seen[stage.seen.index("F2.0 starts") :]


def test_a_schedule_with_pairs_needs_turns() -> None:
    actions = one_f_one_b(1, 2, paired=True)[0]
    with pytest.raises(ValueError, match=r"pairs forwards with backwards: pass turns=Turns\(\)"):
        run_schedule(actions, lambda x, _: x, [torch.ones(())] * 2, Group.single())
    evaluated = run_schedule(
        actions, lambda x, _: x, [torch.ones(())] * 2, Group.single(), forward_only=True
    )
    assert len(evaluated) == 2
