"""What this rank updates, with the state of the update rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from torch import Tensor

from mcore_parallel.data.share import Piece, Share, grads_of
from mcore_parallel.protocols import OnePassRule, UpdateRule
from mcore_parallel.spec import ParamSpec


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """What may differ between parameters: a factor on the learning rate, and weight decay."""

    lr_multiplier: float = 1.0
    weight_decay: float = 0.0


HyperRule: TypeAlias = Callable[[str, ParamSpec], Hyper]
"""(local name, spec) -> Hyper."""


def decay(weight_decay: float) -> HyperRule:
    """Return the usual rule: this weight decay for what decays (`spec.decay`), 0 for the rest."""
    return lambda name, spec: Hyper(weight_decay=weight_decay if spec.decay else 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Elements that the rule updates in one call: `[start, stop)` of the bucket.

    value, grad, state, copy: equally shaped; flat, or one parameter in its own shape. `copy` is
    what is owned of the parameters themselves, where `value` is a master of theirs.
    """

    start: int
    stop: int
    hyper: Hyper
    value: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    copy: Tensor | None


class Shard:
    """What this rank owns of one bucket or parameter: masters, in runs, with the rule's state.

    A parameter in fp32 or wider is its own master. 16-bit parameters get an fp32 copy, in which
    small updates do not vanish.
    """

    def __init__(self, share: Share, rule: UpdateRule, hyper: HyperRule) -> None:
        self.share = share
        self._rule = rule
        self._one_pass = rule if isinstance(rule, OnePassRule) else None
        self._has_copy = share.owned_values.dtype != share.owned_grads.dtype
        self._master = share.owned_values
        if self._has_copy:
            self._master = share.owned_values.to(share.owned_grads.dtype)
        pieces = sorted(share.pieces, key=lambda piece: piece.at)
        if share.keeps_shape:
            groups = [[piece] for piece in pieces]
        else:
            by_hyper = groupby(pieces, key=lambda piece: hyper(piece.slot.name, piece.slot.spec))
            groups = [list(group) for _, group in by_hyper]
        self._runs = [self._run(group, hyper) for group in groups]

    def update(self, lr: float, grad_scale: float, step: int) -> None:
        """Update the masters and the parameters of this shard.

        Gradients are multiplied by `grad_scale` in place, unless the rule does it in its one pass.
        """
        for run in self._runs:
            rate, weight_decay = lr * run.hyper.lr_multiplier, run.hyper.weight_decay
            if self._one_pass is not None:
                self._one_pass.update_once(
                    run.value, run.grad, run.state, lr=rate, weight_decay=weight_decay, step=step,
                    grad_scale=grad_scale, copy=run.copy,
                )  # fmt: skip
            else:
                scaled = run.grad if grad_scale == 1.0 else run.grad.mul_(grad_scale)
                self._rule.update(
                    run.value, scaled, run.state, lr=rate, weight_decay=weight_decay, step=step
                )
        if self._one_pass is None:
            self.publish()

    def publish(self) -> None:
        """Make the parameters of this shard what the masters are."""
        if self._has_copy:
            self.share.owned_values.copy_(self._master)

    def adopt(self) -> None:
        """Make the masters what the parameters of this shard are."""
        if self._has_copy:
            self._master.copy_(self.share.owned_values)

    def tensors(self) -> Iterator[tuple[Piece, dict[str, Tensor]]]:
        """Yield every piece with flat views of its master, as "model", and of its state by name."""
        for piece in self.share.pieces:
            run = next(run for run in self._runs if run.start <= piece.at < run.stop)
            within = slice(piece.at - run.start, piece.end - run.start)
            tensors = {"model": run.value} | run.state
            yield piece, {kind: tensor.view(-1)[within] for kind, tensor in tensors.items()}

    def _run(self, pieces: list[Piece], hyper: HyperRule) -> Run:
        first = pieces[0]
        start, stop = first.at, pieces[-1].end
        origin, _ = self.share.owned
        value = self._master[start - origin : stop - origin]
        grad = grads_of(self.share, start, stop)
        copy = self.share.owned_values[start - origin : stop - origin] if self._has_copy else None
        if self.share.keeps_shape:
            shape = first.slot.param.shape
            value, grad = value.view(shape), grad.view(shape)
            copy = None if copy is None else copy.view(shape)
        return Run(
            start=start,
            stop=stop,
            hyper=hyper(first.slot.name, first.slot.spec),
            value=value,
            grad=grad,
            state=self._state(first.slot.name, value),
            copy=copy,
        )

    def _state(self, name: str, value: Tensor) -> dict[str, Tensor]:
        state = self._rule.init(value)
        shapes = {kind: list(tensor.shape) for kind, tensor in state.items()}
        if shapes != {kind: list(value.shape) for kind in self._rule.state_names}:
            raise ValueError(
                f"{type(self._rule).__name__}: the state of {name} has shapes {shapes}; it needs "
                f"{list(self._rule.state_names)}, each of shape {list(value.shape)}"
            )
        return state
