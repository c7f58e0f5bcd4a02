"""The residual stream between the parts of a decoder: t tokens here, H hidden."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from mcore_models.common.norm import RMSNorm


class Residual(NamedTuple):
    """A sum [t, H] to which the output of the last part may still have to be added.

    An RMS norm that comes next does so in the same pass over the rows; the numbers are those of
    one after the other. A tuple, because whoever hooks modules looks for tensors in tuples.
    """

    total: Tensor
    pending: Tensor | None = None

    @classmethod
    def of(cls, hidden: Tensor | Residual) -> Residual:
        """The stream that hidden states are, unless they are one already."""
        return cls(hidden) if isinstance(hidden, Tensor) else hidden

    def settled(self) -> Tensor:
        """The whole sum [t, H]."""
        return self.total if self.pending is None else self.total + self.pending

    def plus(self, out: Tensor) -> Residual:
        """With the output [t, H] of a part."""
        return Residual(self.settled(), out)

    def normed(self, norm: nn.Module | None) -> tuple[Tensor, Residual]:
        """The norm of the sum (the sum itself for None), and the stream with nothing pending."""
        # Not a subclass, which may know nothing of a second argument.
        if type(norm) is RMSNorm and self.pending is not None and self._are_alike():
            normed, total = norm(self.total, self.pending)
            return normed, Residual(total)
        total = self.settled()
        return total if norm is None else norm(total), Residual(total)

    def _are_alike(self) -> bool:
        assert self.pending is not None
        return self.pending.dtype == self.total.dtype and self.pending.shape == self.total.shape
