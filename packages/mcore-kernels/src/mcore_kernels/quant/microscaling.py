"""Block formats of Blackwell, emulated: MXFP8 (OCP Microscaling 1.0) and NVFP4.

Shapes: R rows, C columns; blocks of B neighbours of a row share a scale, and B divides C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_kernels.quant.formats import E2M1, E4M3, Format, decode_e2m1, encode_e2m1

MXFP8 = 32
"""Elements of a block of MXFP8."""
NVFP4 = 16
"""Elements of a block of NVFP4."""
_BIAS = 127


@dataclass(frozen=True, kw_only=True)
class BlockScaled:
    """Numbers and the scales of their blocks.

    Attributes:
        data: [R, C] in a format of one byte, or [R, C/2] uint8 with two E2M1 codes each, the first
            in the lower half.
        scale: [R, C/B], float8_e8m0fnu or float8_e4m3fn.
        tensor_scale: float32, one number that multiplies everything; None: 1.
    """

    data: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None


def mxfp8_quantize(x: Tensor, fmt: Format = E4M3, *, saturate: bool = False) -> BlockScaled:
    """Return x [R, C] as MXFP8, with a power of two for each 32 elements.

    The power is the least with which the block's largest is within the format, as NVIDIA's
    libraries take it; with `saturate` it is the standard's own floor(log2 amax) - exponent of the
    format, with which the largest may lie above and becomes the largest number.

    A NaN or an infinity makes the scale of its block NaN, and with it the block.
    """
    blocks = _blocks(x, MXFP8, "mxfp8")
    amax = blocks.abs().amax(-1)
    if saturate:
        exponent = torch.frexp(amax).exponent - 1 - fmt.exponent
    else:
        # amax / maximum is rounded; the bits of both are not, and compare as the quotient would.
        part, exponent = torch.frexp(amax)
        most, of_format = torch.frexp(torch.tensor(fmt.maximum))
        exponent = exponent - int(of_format) + (part > most.to(part.device))
    codes = (exponent + _BIAS).clamp(0, 254)
    codes = torch.where(amax == 0, 0, codes)
    inverse = torch.ldexp(torch.ones_like(amax), _BIAS - codes)
    data = fmt.encode(blocks * inverse.unsqueeze(-1)).view(x.shape)
    codes = torch.where(amax.isfinite(), codes, 255).to(torch.uint8)
    return BlockScaled(data=data, scale=codes.view(torch.float8_e8m0fnu))


def mxfp8_dequantize(q: BlockScaled) -> Tensor:
    """Return the float32 tensor [R, C]."""
    codes = q.scale.view(torch.uint8).to(torch.int32)
    scale = torch.ldexp(torch.ones_like(codes, dtype=torch.float32), codes - _BIAS)
    scale = torch.where(codes == 255, torch.nan, scale)
    return (q.data.float().view(*scale.shape, MXFP8) * scale.unsqueeze(-1)).view(q.data.shape)


def nvfp4_quantize(x: Tensor) -> BlockScaled:
    """Return x [R, C] as NVFP4: E2M1, an E4M3 scale for each 16 elements, and one for the tensor.

    The tensor's scale brings the largest block scale to the largest of E4M3. A NaN makes the scale
    of its block NaN, and with it the block.
    """
    blocks = _blocks(x, NVFP4, "nvfp4")
    amax = blocks.abs().amax(-1)
    # Of the finite ones: a NaN in one block is no concern of the others.
    largest = torch.where(amax.isfinite(), amax, 0.0).amax() if amax.numel() else amax.new_zeros(())
    whole = largest / (E2M1.maximum * E4M3.maximum)
    whole = torch.where(whole < torch.finfo(torch.float32).tiny, 1.0, whole)
    scale = E4M3.encode(torch.where(amax.isfinite(), amax / E2M1.maximum / whole, torch.nan))
    step = scale.float() * whole
    # Where the scale underflows to 0 so do the numbers.
    codes = encode_e2m1(torch.where(step.unsqueeze(-1) == 0, 0.0, blocks / step.unsqueeze(-1)))
    codes = codes.view(x.shape)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return BlockScaled(data=packed, scale=scale, tensor_scale=whole)


def nvfp4_dequantize(q: BlockScaled) -> Tensor:
    """Return the float32 tensor [R, C]."""
    assert q.tensor_scale is not None
    codes = torch.stack([q.data & 15, q.data >> 4], -1).flatten(-2)
    step = (q.scale.float() * q.tensor_scale).unsqueeze(-1)
    return (decode_e2m1(codes).view(*q.scale.shape, NVFP4) * step).view(codes.shape)


def _blocks(x: Tensor, size: int, name: str) -> Tensor:
    if x.ndim != 2 or x.shape[1] % size:
        raise ValueError(
            f"{name}: blocks of {size} must fill the rows of a matrix, got shape {list(x.shape)}; "
            f"the next width is {-(-x.shape[-1] // size) * size}"
        )
    return x.detach().float().view(x.shape[0], x.shape[1] // size, size)
