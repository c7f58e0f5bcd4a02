"""Comparing an implementation with the specification: results, gradients and separate methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.ops import OPERATORS
from mcore_kernels.protocols import accumulation_dtype
from mcore_kernels.registry import implementation_named, operator_named, resolve
from mcore_kernels.target import Target
from mcore_kernels.testing import methods, moe, quant, quant_grouped, spec, step
from mcore_kernels.testing.case import Case
from mcore_kernels.testing.cases import cases
from mcore_kernels.testing.compare import assert_close

_COMPARISONS: Mapping[str, Callable[[Any, dict[str, Any], dict[str, Any], str], None]] = {
    "cross_entropy": methods.compare_vocab_loss,
    "moe_route": moe.compare_route,
    "moe_permute": moe.compare_permute,
    "quantize": quant.compare_quantize,
    "fp8_matmul": quant.compare_fp8_matmul,
    "fp8_grouped": quant_grouped.compare_fp8_grouped,
    "adam": step.compare_adam,
    "grad_stats": step.compare_grad_stats,
    "sample": step.compare_sample,
}
"""Operators that are more than one differentiable call."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def runnable(target: Target) -> list[tuple[str, str]]:
    """(operator, implementation) of all that can run on the target in at least one dtype."""
    return [
        (operator.name, one.name)
        for operator in OPERATORS.values()
        for one in operator.implementations
        if any(one.refusal(replace(target, dtype=dtype)) is None for dtype in DTYPES)
    ]


def assert_matches_reference(
    op: str,
    implementation: str,
    *,
    target: Target | None = None,
    seed: int = 0,
    every: int = 1,
) -> list[str]:
    """Compare an implementation with the specification, in every dtype that it takes.

    The specification (`mcore_kernels.testing.spec`) is run in float64 on the same numbers;
    results and gradients have to agree to a few units in the last place of the dtype tested, and
    to have the same shapes, dtypes and NaNs. The operator's separate methods (products of linear,
    backward of attention) are compared too.

    Args:
        op: name of the operator.
        implementation: its name, or the import path of an `Implementation`.
        target: where to run; the dtype is replaced. Default: CPU.
        seed: for the numbers.
        every: only each so-manieth case in dtypes after the first, where a call takes long (the
            dtypes of a kernel share all but its loads and stores).

    Returns:
        What was compared: "float32: odd sizes", ….

    Raises:
        AssertionError: they differ; the message names dtype, case, tensor and worst element.
        ValueError: no such implementation, or it can run here in no dtype.
    """
    target = target or Target()
    chosen = implementation_named(operator_named(op), implementation)
    dtypes = [d for d in DTYPES if chosen.refusal(replace(target, dtype=d)) is None]
    if not dtypes:
        resolve(op, target=target, require=implementation)  # raises, with the reason
    done: list[str] = []
    for dtype in dtypes:
        resolved = resolve(op, target=replace(target, dtype=dtype), require=implementation)
        for case in cases(op, seed=seed)[:: every if done else 1]:
            label = f"{op}: {implementation!r} in {str(dtype).removeprefix('torch.')}: {case.name}"
            _compare(op, resolved, case, dtype, target.device_type, label)
            done.append(label.partition(" in ")[2])
    return done


def _compare(  # noqa: PLR0917 -- one internal caller
    op: str, resolved: Any, case: Case, dtype: torch.dtype, device: str, label: str
) -> None:
    arguments = _cast(case, dtype, device)
    wide = {name: _widened(value) for name, value in arguments.items()}
    if op in _COMPARISONS:
        _COMPARISONS[op](resolved, arguments, wide, label)
        return
    results = _run(resolved, arguments, case)
    expected = _run(getattr(spec, op), wide, case)
    assert results.keys() == expected.keys(), f"{label}: {list(results)} for {list(expected)}"
    like = next(iter(arguments.values())).dtype
    for name, value in expected.items():
        argument = arguments.get(name.removeprefix("gradient of "))
        wanted = like if argument is None else argument.dtype
        slack = case.slack * (4.0 if argument is not None else 1.0)
        if name == "result 1" and op in ("attention", "paged_attention"):
            # The log-sum-exp: of 16-bit inputs, torch's CPU kernel keeps four digits and no more.
            wanted, slack = accumulation_dtype(like), slack * (64.0 if like.itemsize == 2 else 1.0)
        if name == "result 1" and op in ("ssd_scan", "gated_delta_rule"):
            wanted = accumulation_dtype(like)
        scans = op in ("ssd_scan", "gated_delta_rule")
        if scans and resolved.name == "triton" and like.itemsize == 2:
            # Its products are of 16 bits: what leaves it in float32 has so many digits.
            slack *= torch.finfo(like).eps / torch.finfo(wanted).eps
        if name == "result 1" and op == "add_rms_norm":
            wanted = torch.promote_types(like, arguments["residual"].dtype)
        assert_close(
            results[name], value, dtype=wanted, slack=slack, floor=case.floor,
            label=f"{label}: {name}",
        )  # fmt: skip
    if op == "linear":
        methods.compare_linear(resolved, arguments, wide, label)
    if op == "grouped_linear":
        moe.compare_grouped_products(resolved, arguments, wide, label)
    if op == "rope" and not case.expanded:
        methods.compare_rope_inplace(resolved, arguments, label)
    if op == "attention" and case.grads and "sinks" not in arguments:
        methods.compare_attention_backward(resolved, arguments, wide, case, label)


def _cast(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The case's arguments on the device in the dtype, laid out in memory as the case says."""

    def cast(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point() or value.dtype.itemsize == 1:
            return value.to(device)
        wanted = torch.promote_types(torch.float32, dtype) if name in case.fixed else dtype
        if value.is_contiguous():
            return value.to(device, wanted)
        base = value if value._base is None else value._base
        moved = base.to(device, wanted)
        return moved.as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: cast(name, value) for name, value in case.arguments.items()}


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double()
    return value


def _run(fn: Callable[..., Any], arguments: Mapping[str, Any], case: Case) -> dict[str, Tensor]:
    """Results by position and gradients by name, for a gradient drawn from the case's name."""
    arguments = dict(arguments)
    for name in case.grads:
        arguments[name] = arguments[name].detach().requires_grad_()
    results = fn(**arguments)
    results = results if isinstance(results, tuple) else (results,)
    named = {f"result {i}": value.detach() for i, value in enumerate(results)}
    outputs = [value for value in results if value.requires_grad]
    if case.grads and outputs:
        gradients = [_gradient(value, case) for value in outputs]
        inputs = [arguments[name] for name in case.grads]
        found = torch.autograd.grad(outputs, inputs, gradients, materialize_grads=True)
        for name, value in zip(case.grads, found, strict=True):
            named[f"gradient of {name}"] = value
    return named


def _gradient(value: Tensor, case: Case) -> Tensor:
    if case.expanded:
        return value.new_full((), 0.5).expand(value.shape)
    generator = torch.Generator().manual_seed(len(case.name))
    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    # Numbers that every dtype holds exactly, so that all runs get the same gradient.
    return drawn.mul(16).round().div(16).to(value.device, value.dtype)
