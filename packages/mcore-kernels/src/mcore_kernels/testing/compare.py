"""What "equal" means between an implementation and its specification."""

from __future__ import annotations

import torch
from torch import Tensor

ULPS = 6.0
"""Units in the last place of the dtype, relative to |element| + mean |element| (+ a floor)."""


def assert_close(
    value: Tensor,
    expected: Tensor,
    *,
    dtype: torch.dtype,
    slack: float = 1.0,
    floor: float = 0.0,
    label: str = "",
) -> None:
    """Compare a result with one in float64.

    Args:
        value: what was computed.
        expected: the same in float64.
        dtype: the dtype that `value` must have, and whose precision it is held to.
        slack: how many times the usual tolerance is granted.
        floor: size of the numbers that cancel in a result; rounding errors are relative to it.
        label: begins the message.

    Raises:
        AssertionError: shape, dtype, infinities or NaNs differ, or an element is too far off.
    """
    assert value.dtype == dtype, f"{label}: dtype {value.dtype}, expected {dtype}"
    assert value.shape == expected.shape, f"{label}: {value.shape}, expected {expected.shape}"
    if not value.numel():
        return
    found, wanted = value.double(), expected.to(dtype).double()
    assert torch.equal(found.isnan(), wanted.isnan()), (
        f"{label}: {int(found.isnan().sum())} NaNs, expected {int(wanted.isnan().sum())}"
    )
    # Where rounding to the dtype overflows, a value just below the edge is as good.
    limit = torch.finfo(dtype).max
    found, wanted = (
        x.clamp(-limit, limit) if dtype == torch.float16 else x for x in (found, wanted)
    )
    finite = wanted.isfinite()
    same = found.eq(wanted) | finite | wanted.isnan()
    assert bool(same.all()), f"{label}: infinities differ at {int((~same).sum())} elements"
    size = torch.where(finite, wanted, 0.0).abs()
    tolerance = ULPS * slack * torch.finfo(dtype).eps * (size + size.mean() + floor)
    tolerance += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * ULPS
    error = torch.where(finite, (found - wanted).abs(), 0.0)
    worst = int((error / tolerance).argmax())
    assert bool((error <= tolerance).all()), (
        f"{label}: element {worst} of {tuple(value.shape)} is {found.flatten()[worst]:.9g}, "
        f"expected {wanted.flatten()[worst]:.9g}, off by {error.flatten()[worst]:.3g}, "
        f"tolerance {tolerance.flatten()[worst]:.3g}"
    )
