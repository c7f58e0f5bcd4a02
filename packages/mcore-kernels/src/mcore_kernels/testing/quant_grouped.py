"""Products per expert in numbers of 8 bits: what they are compared on, and how."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.quant.formats import E4M3, E5M2, Format
from mcore_kernels.quant.recipe import Fp8Recipe
from mcore_kernels.quant.scaling import Block
from mcore_kernels.testing.case import Case, Make, scattered, slice_of_rows, with_nan
from mcore_kernels.testing.compare import assert_close
from mcore_kernels.testing.quant import exact_of, quantized, same_numbers

Parts = list[tuple[Tensor, Tensor]]


def fp8_grouped(make: Make) -> Iterator[Case]:
    """Cases of products per expert."""

    def case(  # noqa: PLR0917 -- a row of a table
        name: str, x: Tensor, out: int, counts: Any, scaling: str, fmt: Format
    ) -> Case:
        arguments = {"x": x, "weight": make(len(counts), out, x.shape[1]), "counts": counts}
        arguments |= {"scaling": scaling, "fmt": fmt}
        return Case(name=name, arguments=arguments, grads=(), floor=1.0)

    for scaling, fmt in (("tensor", E4M3), ("row", E4M3), ("block", E5M2)):
        yield case(scaling, make(20, 32), 24, (6, 4, 10), scaling, fmt)
        yield case(f"{scaling}, odd sizes", make(13, 7), 11, (5, 1, 7), scaling, fmt)
    yield case("several pieces", make(140, 36), 6, (131, 9), "tensor", E5M2)
    yield case("several pieces and tiles", make(140, 135), 4, (131, 9), "block", E4M3)
    yield case("empty experts", make(9, 16), 16, (0, 4, 0, 0, 5, 0), "block", E4M3)
    yield case("one expert has all", make(9, 16), 16, (0, 9, 0), "tensor", E5M2)
    yield case("no tokens", make(0, 16), 16, (0, 0), "tensor", E4M3)
    there = torch.tensor([4, 0, 5])
    yield case("counts on the device", make(9, 16), 16, there, "tensor", E5M2)
    yield case("counts on the device, blocks", make(9, 16), 16, there, "block", E4M3)
    yield case("slice of rows", slice_of_rows(make(9, 16)), 8, (4, 5), "tensor", E4M3)
    yield case("large values", make(9, 16, scale=1e3), 8, (4, 5), "block", E4M3)
    yield case("NaN in one expert", with_nan(make(9, 16)), 8, (4, 5), "tensor", E4M3)
    yield case("scattered", scattered(make(9, 16)), 8, (4, 5), "tensor", E4M3)


def compare_fp8_grouped(
    op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str
) -> None:
    """Numbers and scales bit for bit, expert by expert; then products of what they stand for."""
    x, weight, counts = (arguments[name] for name in ("x", "weight", "counts"))
    recipe = Fp8Recipe(scaling=arguments["scaling"], grad_format=arguments["fmt"].name)
    numbers = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    dy = torch.arange(x.shape[0] * weight.shape[1], device=x.device) % 13 - 6.5
    dy = dy.to(x.dtype).view(x.shape[0], weight.shape[1])
    wholes = {"input": x, "grad": dy, "weight": weight}
    ways: dict[str, Any] = {}
    meant: dict[tuple[str, int], list[Tensor]] = {}
    for role, whole in wholes.items():
        given = None if role == "weight" else counts
        fmt, block = recipe.format(role), recipe.block(role)
        parts = list(whole) if given is None else list(whole.split(numbers))
        ways[role] = op.encode(whole, given, fmt, block)
        # Scales of tensors show what it is for the others.
        amax: Any = op.amax(whole, given) if role == "input" else ()
        for i, part in enumerate(parts[: len(amax)]):
            largest = part.float().abs().max() if part.numel() else torch.zeros(())
            same_numbers(amax[i], largest.to(amax.device), f"{label}: amax of {role} {i}")
        for way, (data, scale) in enumerate(ways[role]):
            found = _parts(data, scale, numbers if given is not None else None, way, block)
            meant[role, way] = []
            for (one, its), part in zip(found, parts, strict=True):
                wanted, scales = quantized(part.t() if way else part, fmt, block)
                meant[role, way].append(exact_of(wanted, scales, block))
                if part.numel():
                    same_numbers(one, wanted, f"{label}: numbers of {role}, way {way}")
                    same_numbers(its, scales, f"{label}: scales of {role}, way {way}")
    # The scales are float32 whatever the result is; so large values overflow float16 only.
    slack = 4.0 if x.dtype != torch.float64 else 2.0**30
    rest = {"slack": slack, "floor": 1.0}
    for name, role, way in (("output", "input", 0), ("input gradient", "grad", 1)):
        y = op.product(
            ways[role][0], ways["weight"][way], counts, x_block=recipe.block(role),
            weight_block=recipe.block("weight"), dtype=x.dtype,
        )  # fmt: skip
        pairs = list(zip(meant[role, 0], meant["weight", way], strict=True))
        own = torch.cat([a.abs() @ b.abs().t() for a, b in pairs])
        wanted = torch.cat([a @ b.t() for a, b in pairs])
        assert_close(_cut(y, wanted, own), wanted, dtype=x.dtype, label=f"{label}: {name}", **rest)
    buffer = torch.full(weight.shape, 0.5, dtype=torch.float32, device=x.device)
    op.weight_grad(
        ways["grad"][1], ways["input"][1], counts, block=recipe.block("grad"), out=buffer
    )
    pairs = list(zip(meant["grad", 1], meant["input", 1], strict=True))
    wanted = torch.stack([a @ b.t() for a, b in pairs]) + 0.5
    own = torch.stack([a.abs() @ b.abs().t() for a, b in pairs])
    assert_close(
        _cut(buffer, wanted, own), wanted, dtype=torch.float32, slack=8.0, floor=8.0,
        label=f"{label}: weight gradient",
    )  # fmt: skip


def _cut(found: Tensor, wanted: Tensor, own: Tensor) -> Tensor:
    """What was found, and what was wanted where tensor cores may err by so much."""
    if not found.is_cuda or found.dtype != torch.float32:
        return found
    # They cut what they add in float8 at 13 bits below the largest of it, each time.
    near = (found.double() - wanted).abs() <= 2.0**-11 * own
    return torch.where(near, wanted.to(found.dtype), found)


def _parts(data: Tensor, scale: Tensor, counts: list[int] | None, way: int, block: Block) -> Parts:
    """Numbers and scales of each expert, as those of a matrix by itself."""
    if counts is None:
        return list(zip(data, scale, strict=True))
    found: Parts = []
    ends = list(accumulate(counts))
    places = [0, *accumulate(-(-n // 128) * 128 for n in counts)]
    for i, count in enumerate(counts):
        first = places[i] if way else ends[i] - count
        at, pieces = slice(first, first + count), slice(first // 128, places[i + 1] // 128)
        numbers = data[:, at] if way else data[at]
        if block == (0, 0):
            found.append((numbers, scale[i : i + 1]))
        elif not way:
            found.append((numbers, scale[at]))
        else:
            found.append((numbers, scale[:, [i]] if block == (1, 0) else scale[:, pieces]))
    return found
