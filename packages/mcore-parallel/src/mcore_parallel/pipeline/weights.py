"""Weight gradients that are computed in an action of their own, after the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Compute: TypeAlias = Callable[[], Tensor]
Pending: TypeAlias = "dict[nn.Parameter, list[Compute]]"


class DeferredGradients:
    """Splits the backward pass of some parameters: input gradients now, theirs later.

    Parameters get an attribute `deferred`, this object. An operator that would compute a weight's
    gradient in its backward asks `is_collecting` and, if so, hands the computation over with `put`
    and returns no gradient: the linear layers of `mcore_parallel.tensor` do. Gradients of other
    operators (norms, embeddings, biases, plain `nn.Linear`) are computed in the backward pass as
    ever: they cost little, or belong to a model that gains nothing from a split schedule.

    `run_schedule(…, weight_gradients=…)` collects during a B action and computes in its W action.
    What is kept in between is the input and the output gradient of each operator.

    A weight that several operators use must not be deferred by some of them only; `put` may be
    called for it several times.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._pending: Pending | None = None
        for parameter in self._parameters:
            parameter.deferred = self  # type: ignore[attr-defined]

    @property
    def is_collecting(self) -> bool:
        """Whether a backward pass runs whose weight gradients are wanted later."""
        return self._pending is not None

    def put(self, parameter: nn.Parameter, compute: Compute) -> None:
        """Leave for later what returns the gradient of `parameter` (or adds it to `main_grad`)."""
        assert self._pending is not None, "ask is_collecting first"
        self._pending.setdefault(parameter, []).append(compute)

    @contextmanager
    def collect(self) -> Iterator[Pending]:
        """Collect within the block; the mapping it yields is for `compute`."""
        pending: Pending = {}
        self._pending = pending
        try:
            yield pending
        finally:
            self._pending = None

    @staticmethod
    def compute(pending: Pending) -> None:
        """Compute what was collected and accumulate it as a backward pass would, hooks included."""
        while pending:
            parameter = next(iter(pending))
            computes = pending.pop(parameter)
            torch.autograd.backward(_Gradient.apply(parameter, computes))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Take the attribute off the parameters."""
        for parameter in self._parameters:
            del parameter.deferred  # type: ignore[attr-defined]
        self._parameters.clear()


class _Gradient(torch.autograd.Function):
    """A scalar whose backward gives a parameter its gradient, once, whoever contributes to it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, computes: list[Compute]) -> Tensor:
        ctx.computes = computes
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.computes[0]()
        for compute in ctx.computes[1:]:
            total = total + compute()
        return total, None
