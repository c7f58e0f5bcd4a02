"""Operators around a model: the update of its weights, and the choice of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class AdamOp(Protocol):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) on flat buffers, decay decoupled or not."""

    def __call__(
        self,
        value: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        decoupled: bool = True,
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
        copy: Tensor | None = None,
    ) -> None:
        """Update value [N], exp_avg [N] and exp_avg_sq [N] in place; `step` counts from 1.

        All lie in one piece. value is float32 (or wider); grad has any float dtype; the moments
        are float32 or bfloat16 (rounded to nearest after the step, which itself is computed from
        the unrounded ones). With m̂ and v̂ the moments divided by 1 - betaᵗ:

            value ← value · (1 - lr · weight_decay) - lr · m̂ / (√v̂ + eps)

        Without `decoupled`, weight_decay · value is added to the gradient instead. `grad_scale`
        (one number) multiplies the gradient: 1 / loss scale, or a clip factor. `skip` (one number)
        leaves everything as it is unless it is 0: the count of an overflow, never read back.
        `copy` [N], such as the bfloat16 weights, receives the new value, rounded.

        Raises:
            ValueError: shapes differ, a tensor does not lie in one piece, or a bfloat16 moment
                could not decay (1 - beta is below half a unit in its last place).
        """


class GradStatsOp(Protocol):
    """Norm and health of gradients that lie in several buffers."""

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return [2]: the sum of squares of the finite elements, and how many are not finite.

        In float32 (float64 when a tensor is float64), on the device of the tensors, of any shapes
        and float dtypes. Both add up over ranks: the caller reduces them, and takes the root.

        Raises:
            ValueError: there is no tensor.
        """


class SampleOp(Protocol):
    """The choice of the next token."""

    def __call__(
        self,
        logits: Tensor,
        uniform: Tensor,
        *,
        temperature: Tensor,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens [N] int64, and ln p [N] float32 of each in what it was drawn from.

        logits [N, V]; one number per row in each of the others. `temperature` divides the logits;
        0 takes the largest. Then `top_k` keeps that many (0: all), `top_p` the fewest that have
        at least this share of what is left, `min_p` those of at least this share of the largest
        probability; None cuts nothing in any row. Ties go to the lowest ids, at every edge.
        `uniform` float64 in [0, 1) places the draw on the cumulative sum over the ids, in float64:
        a row's token depends on that row alone. `uniforms` makes the numbers from seeds.

        A row without a distribution (a NaN, or nothing above -inf) gives token -1 and NaN.
        """
