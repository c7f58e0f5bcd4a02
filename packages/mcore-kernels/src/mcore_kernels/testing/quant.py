"""Numbers of 8 bits: what quantisation and products of them are compared on, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.quant.formats import E4M3, E5M2, Format
from mcore_kernels.quant.scaling import Block
from mcore_kernels.testing.case import Case, Make, scattered, slice_of_rows, with_nan
from mcore_kernels.testing.compare import assert_close

_TENSOR, _ROW, _PIECE, _TILE = (0, 0), (1, 0), (1, 128), (128, 128)


def quantize(make: Make) -> Iterator[Case]:
    """Cases of quantisation."""

    def case(name: str, x: Tensor, block: Block, fmt: Format = E4M3, **options: Any) -> Case:
        arguments = {"x": x, "fmt": fmt, "block": block, **options}
        return Case(name=name, arguments=arguments, grads=(), fixed=("scale",))

    broken = with_nan(make(3, 140))
    for fmt in (E4M3, E5M2):
        yield case(f"tensor, {fmt.name}", make(5, 33, scale=3.0), _TENSOR, fmt)
        yield case(f"rows, {fmt.name}", make(5, 33), _ROW, fmt)
        yield case(f"pieces, {fmt.name}", make(3, 140), _PIECE, fmt, power_of_two=True)
        yield case(f"tiles, {fmt.name}", make(130, 5), _TILE, fmt)
    given = torch.full((1, 1), 0.125, dtype=torch.float64)
    yield case("given scale, too small for some", make(4, 40, scale=60.0), _TENSOR, scale=given)
    yield case("other blocks", make(6, 10), (2, 5))
    yield case("zeros", make(4, 9) * 0.0, _ROW)
    yield case("margin", make(4, 9), _TENSOR, margin=2, power_of_two=True)
    yield case("large values", make(4, 9, scale=1e3), _PIECE)
    yield case("scattered", scattered(make(4, 9)), _PIECE, margin=1)
    yield case("slice of rows", slice_of_rows(make(4, 9)), _ROW)
    yield case("one", make(1, 1), _TILE)
    yield case("no rows", make(0, 9), _PIECE)
    yield case("NaN in one piece", broken, _PIECE)
    yield case("NaN", broken, _TILE)
    yield case("NaN in a tensor", -broken, _TENSOR)
    yield case("infinity in a tensor", make(3, 4) / 0.0, _TENSOR)
    yield case("tensor of many numbers", make(90, 100), _TENSOR, power_of_two=True)
    yield case("tensor, several tiles", make(136, 150), _TENSOR)
    yield case("pieces, several tiles", make(136, 150), _PIECE, E5M2)
    yield case("tensor, turned", make(9, 4).t(), _TENSOR)
    yield case("tensor, slice of rows", slice_of_rows(make(4, 9)), _TENSOR)


def compare_quantize(op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str) -> None:
    """Numbers and scales bit for bit, as the formula has them, of the matrix and its transpose."""
    options = {name: value for name, value in arguments.items() if name != "x"}
    x = arguments["x"]
    if "scale" in options:
        arguments = {**arguments, "scale": options["scale"].float()}
    found = op(**arguments), op.both(**arguments)[:2], op.both(**arguments)[2:]
    largest = x.float().abs().amax() if x.numel() else torch.zeros((), device=x.device)
    same_numbers(op.amax(x), largest.view(1), f"{label}: the largest value")
    for (data, scale), matrix in zip(found, (x, x, x.t()), strict=True):
        wanted, wanted_scale = quantized(matrix, **options)
        assert data.dtype == options["fmt"].dtype, f"{label}: numbers are {data.dtype}"
        assert scale.dtype == torch.float32, f"{label}: scales are {scale.dtype}"
        for name, one, other in (("scale", scale, wanted_scale), ("number", data, wanted)):
            same_numbers(one, other, f"{label}: {name}s")


def same_numbers(found: Tensor, wanted: Tensor, label: str) -> None:
    """Require them to be the same, NaN with NaN."""
    assert found.shape == wanted.shape, f"{label} {found.shape}, not {wanted.shape}"
    a, b = found.float(), wanted.float()
    wrong = ~(a.eq(b) | (a.isnan() & b.isnan()))
    assert not bool(wrong.any()), (
        f"{label}: {int(wrong.sum())} differ, such as {a[wrong][0].item():.9g} "
        f"for {b[wrong][0].item():.9g}"
    )


def quantized(  # noqa: PLR0917 -- internal, as QuantizeOp has them
    x: Tensor,
    fmt: Format,
    block: Block,
    scale: Tensor | None = None,
    margin: int = 0,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Numbers and scales block by block; float32 where the contract says so."""
    rows, columns = block[0] or max(x.shape[0], 1), block[1] or max(x.shape[1], 1)
    data = torch.zeros(x.shape, dtype=fmt.dtype, device=x.device)
    counts = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    scales = torch.ones(counts if x.numel() else [max(n, 1) for n in counts], device=x.device)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            part = x[i : i + rows, j : j + columns].float()
            one = part.abs().max() / torch.full_like(part[0, 0], fmt.maximum) * 2.0**margin
            if power_of_two and one.isfinite():
                one = 2.0 ** one.double().log2().ceil().float()
            one = torch.where(part.abs().max() == 0, 1.0, one.float())
            one = one if scale is None else scale.float()[0, 0]
            clamped = (part * (1.0 / one)).clamp(-fmt.maximum, fmt.maximum)
            data[i : i + rows, j : j + columns] = clamped.to(fmt.dtype)
            scales[i // rows, j // columns] = one
    return data, scales


def exact_of(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    """What numbers and scales stand for, float64."""
    rows, columns = block[0] or max(data.shape[0], 1), block[1] or max(data.shape[1], 1)
    each = scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return data.double() * each[: data.shape[0], : data.shape[1]]


def fp8_matmul(make: Make) -> Iterator[Case]:
    """Cases of the product."""

    def case(
        name: str, a: Tensor, b: Tensor, blocks: tuple[Block, Block], fmt: Format = E4M3
    ) -> Case:
        arguments = {"a": a, "b": b, "blocks": blocks, "fmt": fmt}
        return Case(name=name, arguments=arguments, grads=(), floor=1.0)

    yield case("tensors", make(7, 40), make(9, 40), (_TENSOR, _TENSOR))
    yield case("rows", make(5, 16), make(6, 16), (_ROW, _ROW), E5M2)
    yield case("pieces and tiles", make(5, 140), make(6, 140), (_PIECE, _TILE))
    yield case("pieces and pieces", make(33, 150), make(35, 150), (_PIECE, _PIECE), E5M2)
    yield case("pieces and tiles, several", make(3, 260), make(129, 260), (_PIECE, _TILE))
    yield case("sizes of 16", make(16, 32), make(32, 32), (_TENSOR, _TENSOR))
    yield case("pieces, sizes of 128", make(128, 256), make(256, 256), (_PIECE, _PIECE))
    yield case("tiles, sizes of 128", make(256, 128), make(128, 128), (_PIECE, _TILE))
    yield case("rows, sizes of 16", make(16, 32), make(32, 32), (_ROW, _ROW))
    yield case("other blocks", make(4, 8), make(4, 8), ((2, 4), (4, 2)))
    yield case("one", make(1, 1), make(1, 1), (_TENSOR, _TENSOR))
    yield case("no rows", make(0, 16), make(16, 16), (_TENSOR, _TENSOR))
    yield case("nothing summed", make(3, 0), make(4, 0), (_TENSOR, _TENSOR))
    yield case("large values", make(4, 16, scale=1e3), make(4, 16), (_ROW, _ROW))
    yield case("scattered", scattered(make(4, 16)), make(4, 16), (_PIECE, _TILE))
    yield case("NaN", with_nan(make(4, 16)), make(5, 16), (_PIECE, _TILE))
    yield case("pieces, sizes of 16", make(48, 144), make(32, 144), (_PIECE, _PIECE))


def compare_fp8_matmul(
    op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str
) -> None:
    """The product, with that in float64 of what the numbers stand for."""
    factors, exact = [], []
    formats = (arguments["fmt"], E4M3)
    for name, block, fmt in zip(("a", "b"), arguments["blocks"], formats, strict=True):
        data, scale = quantized(arguments[name], fmt, block)
        factors += [data, scale]
        exact.append(exact_of(data, scale, block))
    a_block, b_block = arguments["blocks"]
    dtype = arguments["a"].dtype
    found = op(*factors, a_block=a_block, b_block=b_block, dtype=dtype)
    # The scales are float32 whatever the result is; so large values overflow float16 only.
    slack = 4.0 if dtype != torch.float64 else 2.0**30
    wanted = exact[0] @ exact[1].t()
    if found.is_cuda and dtype == torch.float32:
        # Tensor cores cut what they add in float8 at 13 bits below the largest of it, each time.
        own = 2.0**-11 * (exact[0].abs() @ exact[1].abs().t())
        found = torch.where((found.double() - wanted).abs() <= own, wanted.to(found.dtype), found)
    assert_close(found, wanted, dtype=dtype, slack=slack, floor=1.0, label=label)
