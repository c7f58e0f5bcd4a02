"""Operators of mixtures of experts. E experts, k chosen per token, R rows that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from mcore_kernels.ops.moe_permute.assignment import Assignment
    from mcore_kernels.ops.moe_route.rule import RoutingRule


class MoeRouteOp(Protocol):
    """Which experts a token goes to, and by what their results are multiplied."""

    def __call__(
        self, logits: Tensor, correction: Tensor | None = None, *, rule: RoutingRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(weights [T, k], experts [T, k], scores [T, E])` for logits [T, E].

        `scores` is the rule's function of all logits. The k experts with the largest
        score + correction [E] are chosen, best first, equal ones by the lowest number; `weights`
        come from their scores without the correction. Weights and scores have the accumulation
        dtype (float64 where the rule asks for it), experts are int64. Differentiable in the
        logits, through weights and scores.
        """


class MoePermuteOp(Protocol):
    """Rows of tokens to the order of their experts, and back."""

    def permute(self, x: Tensor, assignment: Assignment) -> Tensor:
        """Return [R, H]: at row i, the token x[assignment.order[i] // k] of x [T, H].

        The gradient of a token is the sum over its kept copies, in the accumulation dtype and in
        the order of the copies: equal from run to run.
        """

    def unpermute(self, rows: Tensor, weights: Tensor | None, assignment: Assignment) -> Tensor:
        """Return [T, H]: the sum of a token's rows [R, H] times its weights [T, k] (None: 1).

        Summed in the accumulation dtype and rounded once. Copies that were dropped add nothing,
        and their weight has gradient 0. Differentiable in rows and weights.
        """


class GroupedLinearOp(Protocol):
    """A linear operator per expert, over rows sorted by expert: `counts[i]` rows with weight i.

    An expert without rows contributes nothing. The three products record no autograd and return
    fresh tensors. Counts may be a tensor [E] on the device: implementations say whether they read
    it back. They may have a method `write_weight_grad(dy, x, counts, out)` as well: what
    `weight_grad` would add is written over what is there, zeros for experts without rows.
    """

    def __call__(self, x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        """Return `x_i weight_iᵀ`: x [R, I], weight [E, O, I] → [R, O]; differentiable."""

    def forward(self, x: Tensor, weight: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        """Return `x_i weight_iᵀ`: x [R, I], weight [E, O, I] → [R, O]."""

    def input_grad(self, dy: Tensor, weight: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        """Return `dy_i weight_i`: dy [R, O], weight [E, O, I] → [R, I]."""

    def weight_grad(
        self, dy: Tensor, x: Tensor, counts: Sequence[int] | Tensor, out: Tensor
    ) -> None:
        """Add `dy_iᵀ x_i` to `out` [E, O, I], at the precision of `out`: dy [R, O], x [R, I]."""
