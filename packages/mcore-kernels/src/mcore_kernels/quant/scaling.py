"""Scales: a tensor is kept as numbers of few bits times a scale for each block of it.

Shapes: R rows, C columns, in blocks of (rows, columns) where 0 means all: (0, 0) the whole tensor,
(1, 0) a row, (1, 128) a piece of a row, (128, 128) a tile. Scales are float32 [ceil(R / rows),
ceil(C / columns)], and multiply the numbers to give back the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.quant.formats import Format

Block = tuple[int, int]

SMALLEST = 2.0**-100
"""No scale is smaller: its inverse, and that times a number, must be finite."""


def scale_of(amax: Tensor, fmt: Format, *, margin: int = 0, power_of_two: bool = False) -> Tensor:
    """Return the scale with which a largest absolute value `amax` becomes the format's largest.

    An amax of 0 has the scale 1. `margin` leaves that many powers of two above; `power_of_two`
    rounds the scale up to one, so that scaling costs no digits.
    """
    # By a tensor: on a GPU torch divides by a number as it multiplies by its rounded inverse.
    maximum = torch.full((), fmt.maximum, dtype=torch.float32, device=amax.device)
    scale = (amax.float() / maximum * 2.0**margin).clamp(min=SMALLEST)
    if power_of_two:
        bits = scale.view(torch.int32)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isfinite(), rounded, scale)
    return torch.where(amax == 0, 1.0, scale)


def block_shape(shape: tuple[int, ...] | torch.Size, block: Block) -> Block:
    """The block with its zeros replaced by the sizes of the tensor."""
    return block[0] or max(shape[0], 1), block[1] or max(shape[1], 1)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest absolute value of each block of x [R, C], float32; a NaN makes it NaN."""
    rows, columns = block_shape(x.shape, block)
    r, c = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    if not x.numel():
        return x.new_zeros(max(r, 1), max(c, 1), dtype=torch.float32)
    if not columns - x.shape[1] and rows in (1, x.shape[0]):
        # Without a copy in float32; aminmax passes NaN on.
        low, high = x.aminmax(dim=1, keepdim=True) if rows == 1 else x.aminmax()
        return torch.maximum(low.abs(), high.abs()).float().view(r, 1)
    padded = F.pad(x.float().abs(), (0, c * columns - x.shape[1], 0, r * rows - x.shape[0]))
    return padded.view(r, rows, c, columns).amax((1, 3))


def spread(scale: Tensor, shape: torch.Size, block: Block) -> Tensor:
    """The scale of each element: [R, C], or what broadcasts to it."""
    if scale.numel() == 1:
        return scale.view(1, 1)
    rows, columns = block_shape(shape, block)
    wide = scale if rows == 1 else scale.repeat_interleave(rows, 0)[: shape[0]]
    if scale.shape[1] == 1 or columns == 1:
        return wide
    return wide.repeat_interleave(columns, 1)[:, : shape[1]]


def dequantize(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    """Return the float32 tensor [R, C] that numbers and scales stand for."""
    return data.float() * spread(scale, data.shape, block)


@dataclass(frozen=True)
class DelayedScale:
    """Scales from the largest absolute values of the steps before.

    `history` float32 [steps + 1], or [N, steps + 1] for N scales: place 0 collects the step that
    runs, the others are of earlier ones in which there were numbers, the latest first; 0 stands for
    none. It is the state: save it, or register it as a buffer.
    """

    history: Tensor

    @staticmethod
    def fresh(steps: int, device: torch.device | str = "cpu") -> DelayedScale:
        """No history; the scale is 1 until the first step has ended."""
        return DelayedScale(torch.zeros(steps + 1, dtype=torch.float32, device=device))

    def scale(
        self, fmt: Format, *, latest: bool = False, margin: int = 0, power_of_two: bool = False
    ) -> Tensor:
        """The scales [N, 1] of the step that runs: of the largest before, or of the `latest`."""
        amax = self.before(latest=latest)
        return scale_of(amax, fmt, margin=margin, power_of_two=power_of_two).view(-1, 1)

    def before(self, *, latest: bool = False) -> Tensor:
        """The largest absolute values of the steps before [N], or of the `latest`; 0 for none."""
        found = self.history[..., 1] if latest else self.history[..., 1:].amax(-1)
        return found.view(-1)

    def record(self, amax: Tensor) -> None:
        """Take into account largest absolute values [N] of the step that runs."""
        # An overflow says nothing about the numbers to come.
        seen = torch.where(amax.isfinite(), amax.float(), 0.0).view(self.history.shape[:-1])
        self.history[..., 0] = torch.maximum(self.history[..., 0], seen)

    def advance(self) -> None:
        """End the step: all of one step share a scale, in the forward and in the backward."""
        advance_history(self.history)


def advance_history(history: Tensor) -> None:
    """End a step of histories [..., steps + 1]: see `DelayedScale`.

    Where the step had no numbers but zeros the steps before are kept as they are, so that an expert
    without tokens, or a layer that was left out, does not forget.
    """
    history.copy_(torch.where(history[..., :1] > 0, history.roll(1, -1), history))
    history[..., 0] = 0.0
