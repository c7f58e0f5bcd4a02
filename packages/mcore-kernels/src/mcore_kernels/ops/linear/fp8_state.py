"""What a linear layer in 8 bits keeps between its products: a history, and the weight's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.quant.recipe import Fp8Recipe
from mcore_kernels.quant.scaling import DelayedScale, scale_of
from mcore_kernels.target import Target

ROLES = ("input", "weight", "grad")

Pair = tuple[Tensor, ...]
"""Numbers of 8 bits, and their scales."""
Ways = tuple[Pair | None, Pair | None]
"""A factor, and its transpose; None where it was not asked for."""


class Fp8State:
    """The part of `Fp8Linear` and `Fp8GroupedLinear` that knows of steps and of ranks.

    Attributes:
        recipe: formats and scales.
        amax_reduce: given largest values, returns those over all ranks that share a scale.
        reduced: the roles whose largest values go through `amax_reduce`: not those of a factor that
            all ranks have alike.
        history: of a recipe with a history, float32 [3, …, steps + 1]: a row for each of `ROLES`
            and each scale (see `DelayedScale`). It is the state: save it, and call
            `history_loaded` after filling it.
        delayed: the rows by role. They record while products are taken; `advance` ends the step.
            Where nothing has been recorded in a step before, scales are from the tensor at hand.
            What is recorded does not go through `amax_reduce`: ranks share `history[..., 0]` before
            `advance`.
    """

    def __init__(
        self,
        recipe: Fp8Recipe,
        target: Target,
        *,
        name: str,
        emulate: bool,
        groups: tuple[int, ...],
        device: torch.device | str | None,
        history: Tensor | None,
        keeps_weight: bool,
    ) -> None:
        """`groups`: how many scales a factor has; `name` is for errors; the rest as `Fp8Linear`."""
        reason = None if emulate else recipe.refusal(target)
        if reason is not None:
            raise ValueError(f"{name}: cannot run on {target.describe()}: {reason}")
        self.recipe = recipe
        self.amax_reduce: Callable[[Tensor], Tensor] | None = None
        self.reduced = frozenset(ROLES)
        self.history: Tensor | None = None
        self.delayed: dict[str, DelayedScale] = {}
        # The roles of which every scale has a history: known without asking the device.
        self.seen: frozenset[str] = frozenset()
        if recipe.history:
            where = target.device_type if device is None else device
            if history is None:
                history = torch.zeros(len(ROLES), *groups, recipe.history + 1, device=where)
            self.history = history
            self.delayed = {role: DelayedScale(history[i]) for i, role in enumerate(ROLES)}
        self._keeps_weight = keeps_weight
        self._weight: tuple[tuple[object, ...], Ways] | None = None

    # --- from step to step --------------------------------------------------------------------

    def advance(self) -> None:
        """End a step: what was recorded in it now counts for the scales. Looks at its values."""
        for one in self.delayed.values():
            one.advance()
        self.history_loaded()

    def step_ended(self, seen: frozenset[str]) -> None:
        """Take into account that somebody else has advanced the history.

        `seen` are the roles all of whose scales have a history now.
        """
        self.seen = seen
        self.forget_weight()

    def history_loaded(self) -> None:
        """Take into account that the history was filled; looks at its values."""
        seen: frozenset[str] = frozenset()
        if self.history is not None:
            ran = self.history[..., 1:].any(-1).view(len(ROLES), -1)
            seen = roles_of(ran.all(-1).tolist())
        self.step_ended(seen)

    def forget_weight(self) -> None:
        """Drop what is kept of the weight, which has changed."""
        self._weight = None

    # --- within -------------------------------------------------------------------------------

    def _kept_weight(self, weight: Tensor, encode: Callable[[], Ways]) -> Ways:
        """The numbers of the weight both ways, found again where it has changed."""
        key = (weight.data_ptr(), weight.shape, weight.stride(), weight._version)
        if self._weight is None or self._weight[0] != key:
            self._weight = key, encode()
        return self._weight[1]

    @torch.no_grad()
    def _scales(self, role: str, find: Callable[[], Tensor], learn: bool) -> dict[str, Any]:
        """What the operator has to know of scales: how to find them, or those of whole tensors.

        `find` returns the largest values of the factor, one for each scale. learn: record in the
        history, if there is one. Of a weight that is always done: it is what it is, whoever looks.
        """
        recipe = self.recipe
        options: dict[str, Any] = {"margin": recipe.margin, "power_of_two": recipe.power_of_two}
        reduce = self.amax_reduce if role in self.reduced else None
        delayed, amax = self.delayed.get(role), None
        if recipe.scaling != "tensor" or (delayed is None and reduce is None):
            return options  # the operator finds the scale in fewer steps
        records = delayed is not None and (learn or role == "weight")
        if records or role not in self.seen:
            amax = find()
        if delayed is not None and records:
            assert amax is not None
            delayed.record(amax)
        if reduce is not None and role not in self.seen:
            assert amax is not None
            amax = reduce(amax)
        if delayed is not None:
            before = delayed.before(latest=recipe.latest)
            if amax is not None:
                # What nothing went through before has no history of its own. And by a scale of
                # numbers an infinity would become one: an overflow has to stay in sight.
                takes_own = (before == 0) | ~amax.isfinite()
                before = torch.where(takes_own, amax, before)
            amax = before
        assert amax is not None
        return {"scale": scale_of(amax, recipe.format(role), **options)}


def roles_of(flags: list[bool]) -> frozenset[str]:
    """The roles for which a flag is set, in the order of `ROLES`."""
    return frozenset(role for role, flag in zip(ROLES, flags, strict=True) if flag)


def there(pair: Pair | None) -> Pair:
    """A way that was asked for."""
    assert pair is not None
    return pair
