"""Static requirements: functions from a `Target` to None, or to the reason for a refusal."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch

from mcore_kernels.target import Target

Requirement: TypeAlias = Callable[[Target], str | None]


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def needs_package(name: str, minimum: str, *, distribution: str | None = None) -> Requirement:
    """The module `name` is installed, by a distribution of at least version `minimum`.

    It is looked up, not imported, when first asked for. `distribution` is called as the module
    unless given.
    """
    package = distribution or name

    @cache  # every operator of every model asks, and reading what is installed takes its time
    def reason() -> str | None:
        try:
            missing = importlib.util.find_spec(name) is None
        except ModuleNotFoundError:  # what it lies in is not there
            missing = True
        if missing:
            return f"{package} is not installed (needs {package}>={minimum})"
        found = importlib.metadata.version(package)
        if _release(found) < _release(minimum):
            return f"{package} {found} is installed, needs {package}>={minimum}"
        return None

    def check(target: Target) -> str | None:
        return reason()

    return check


def needs_device(*device_types: str) -> Requirement:
    """The target's device is of one of these types."""

    def check(target: Target) -> str | None:
        if target.device_type in device_types:
            return None
        return f"needs {' or '.join(device_types)}, the target is {target.device_type}"

    return check


def needs_arch(minimum: tuple[int, int], *, below: tuple[int, int] | None = None) -> Requirement:
    """A CUDA target has at least this compute capability, and less than `below` if given.

    Other targets pass.
    """

    def check(target: Target) -> str | None:
        if target.device_type != "cuda" or (
            target.arch is not None
            and target.arch >= minimum
            and (below is None or target.arch < below)
        ):
            return None
        wanted = f"needs compute capability {minimum[0]}.{minimum[1]}"
        wanted += " or newer" if below is None else f" to below {below[0]}.{below[1]}"
        if target.arch is None:
            return f"{wanted}, the target's is unknown"
        return f"{wanted}, the target has {target.arch[0]}.{target.arch[1]}"

    return check


def needs_dtype(*dtypes: torch.dtype) -> Requirement:
    """Activations of the target have one of these dtypes."""

    def check(target: Target) -> str | None:
        if target.dtype in dtypes:
            return None
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"needs {names}, the target is {str(target.dtype).removeprefix('torch.')}"

    return check


def needs_head_dim(*, maximum: int, multiple: int = 1) -> Requirement:
    """The target's attention head size is at most `maximum` and a multiple of `multiple`."""

    def check(target: Target) -> str | None:
        size = target.head_dim
        if size is None or (size <= maximum and size % multiple == 0):
            return None
        step = f" and a multiple of {multiple}" if multiple > 1 else ""
        return f"needs a head size of at most {maximum}{step}, the target has {size}"

    return check


def on_cuda(*requirements: Requirement) -> Requirement:
    """A CUDA target meets all of these (other targets pass)."""

    def check(target: Target) -> str | None:
        if target.device_type != "cuda":
            return None
        reasons = [reason for one in requirements if (reason := one(target)) is not None]
        return "; ".join(reasons) if reasons else None

    return check


def needs_triton_target(target: Target) -> str | None:
    """A CUDA device, or the interpreter on CPU where the target asks for it."""
    if target.interpret or target.device_type == "cuda":
        return None
    return f"needs a CUDA device, the target is {target.device_type}"


TRITON_PACKAGE = needs_package("triton", "3.6")
"""Triton itself, whoever writes the kernels."""

TRITON: tuple[Requirement, ...] = (
    needs_triton_target,
    needs_arch((8, 0)),
    TRITON_PACKAGE,
    needs_dtype(torch.float32, torch.bfloat16, torch.float16),
)
"""What every Triton kernel here needs. It accumulates in fp32, so fp64 is refused, not degraded."""
