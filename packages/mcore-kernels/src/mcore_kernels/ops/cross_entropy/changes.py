"""What a head does to its logits between the product and the loss, some tokens at a time.

Shapes: t tokens of a chunk, V columns of this shard.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LogitsChange(Protocol):
    """A differentiable function of the logits of some tokens, each token's apart from the others'.

    It records no autograd, and is called again in the backward where logits are computed again: it
    has to give the same.
    """

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the changed logits [t, V], and what `backward` needs.

        Args:
            logits: [t, V]; may be written over.
            labels: int64 [t], classes of the whole vocabulary.

        The two results share no memory, since the gradient takes the place of the first. Its dtype
        may be a wider one. A logit may be -inf, unless it is the label's or all of a token's are.
        """

    def backward(self, grad: Tensor, kept: Tensor | None) -> Tensor:
        """Return the gradient [t, V] of the logits, of that of the changed ones.

        Both tensors may be written over; the caller rounds to the dtype of the logits.
        """


class SoftCap:
    """`LogitsChange` to cap · tanh(logits / cap) (Gemma 2, arXiv:2408.00118)."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `LogitsChange`."""
        bounded = logits.div_(self.cap).tanh_()
        return bounded * self.cap, bounded

    def backward(self, grad: Tensor, kept: Tensor | None) -> Tensor:
        """See `LogitsChange`."""
        assert kept is not None
        torch.ops.aten.tanh_backward.grad_input(grad, kept, grad_input=grad)
        return grad
