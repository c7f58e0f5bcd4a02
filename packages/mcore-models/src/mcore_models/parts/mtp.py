"""The configuration of multi-token prediction."""

import math
from dataclasses import dataclass

from mcore_models._checks import check_positive


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Modules that predict further tokens in training (DeepSeek-AI, arXiv:2412.19437, 2.2).

    Depth k of `num_depths`, counted from 0, predicts the token k + 2 places on: from what the head
    was given for the depth before, at first by the model itself, and from the embedding of the
    token k + 1 places on, each behind a norm of its own and then projected together, through a
    layer such as the model's last and a norm, by the model's own head.

    Its loss is the cross-entropy of all such tokens of the batch within their documents, divided by
    the number of all valid tokens of the batch; `loss_weight` / `num_depths` times it is part of
    the gradient.

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    num_depths: int = 1
    loss_weight: float = 0.1

    def __post_init__(self) -> None:
        check_positive("mtp.num_depths", self.num_depths)
        if not 0 < self.loss_weight < math.inf:
            raise ValueError(
                f"mtp.loss_weight={self.loss_weight} must be greater than 0 and finite; "
                f"without mtp there are no further predictions"
            )

    @property
    def depth_weight(self) -> float:
        """What the loss of one depth is multiplied by."""
        return self.loss_weight / self.num_depths
