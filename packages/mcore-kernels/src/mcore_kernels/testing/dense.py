"""The arguments on which operators of dense layers are compared, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from mcore_kernels.ops.glu.formulas import FORMULAS
from mcore_kernels.testing.case import Case, Make, scattered, slice_of_rows, with_nan


def linear(make: Make) -> Iterator[Case]:
    """Cases of linear."""

    def case(name: str, x: Tensor, out: int, bias: bool = True, **more: Any) -> Case:
        weight = make(out, x.shape[1])
        return Case(
            name=name,
            arguments={"x": x, "weight": weight, "bias": make(out) if bias else None},
            grads=("x", "weight", "bias") if bias else ("x", "weight"),
            **more,
        )

    yield case("plain", make(32, 48), 24, bias=False)
    yield case("odd sizes with bias", make(13, 7), 11)
    yield case("one element", make(1, 1), 1)
    yield case("no tokens", make(0, 7), 5)
    yield case("no outputs", make(3, 7), 0)
    yield case("scattered", scattered(make(13, 7)), 11)
    yield case("expanded gradient", make(13, 7), 11, expanded=True)
    yield case("large values", make(9, 33, scale=1e3), 5)
    yield case("NaN", with_nan(make(9, 33)), 5)


def _norm_inputs(make: Make) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    yield "plain", make(6, 64), {}
    yield "odd sizes", make(13, 37), {}
    yield "leading dims", make(2, 3, 5, 20), {}
    yield "one vector", make(8), {}
    yield "many short rows", make(150, 5), {}
    yield "one element", make(1, 1), {"floor": 1.0}  # its gradient is a difference of equals
    yield "no rows", make(0, 37), {}
    yield "scattered", scattered(make(5, 37)), {}
    yield "slice of rows", slice_of_rows(make(5, 37)), {}
    yield "transposed", make(37, 5).t(), {}
    yield "expanded gradient", make(5, 37), {"expanded": True}
    yield "large values", make(5, 37, scale=1e3), {}
    yield "small values", make(5, 37, scale=1e-3), {}
    yield "wide rows", make(3, 1100), {}
    yield "NaN", with_nan(make(5, 37)), {}


def rms_norm(make: Make) -> Iterator[Case]:
    """Cases of the RMS norm."""
    for name, x, more in _norm_inputs(make):
        arguments = {"x": x, "weight": make(x.shape[-1]), "eps": 1e-5}
        yield Case(name=name, arguments=arguments, grads=("x", "weight"), **more)
    arguments = {"x": make(9, 24), "weight": make(24), "eps": 1e-6}
    yield Case(name="float32 weight", arguments=arguments, grads=("x", "weight"), fixed=("weight",))
    yield Case(
        name="zero-centred weight",
        arguments={**arguments, "zero_centered": True},
        grads=("x", "weight"),
    )
    yield Case(name="no weight", arguments={**arguments, "weight": None}, grads=("x",))


def add_rms_norm(make: Make) -> Iterator[Case]:
    """Cases of the RMS norm behind a residual sum."""

    def case(name: str, x: Tensor, **more: Any) -> Case:
        # Of one sign with x: where the two cancel, the norm shows how the sum was rounded.
        residual = x.nan_to_num() * make(*x.shape).abs()
        arguments = {"x": x, "residual": residual, "weight": make(x.shape[-1]), "eps": 1e-5}
        return Case(name=name, arguments=arguments, grads=("x", "residual", "weight"), **more)

    for name, x, more in _norm_inputs(make):
        yield case(name, x, **more)
    yield case("float32 residual", make(9, 24), fixed=("residual",))
    wide = case("zero-centred weight", make(9, 24))
    yield replace(wide, arguments={**wide.arguments, "zero_centered": True})


def layer_norm(make: Make) -> Iterator[Case]:
    """Cases of the layer norm."""
    names = ("x", "weight", "bias")
    for name, x, more in _norm_inputs(make):
        if x.shape[-1] > 1:  # one element less its mean is nothing but rounding
            size = x.shape[-1]
            arguments = {"x": x, "weight": make(size), "bias": make(size), "eps": 1e-5}
            yield Case(name=name, arguments=arguments, grads=names, **more)
    arguments = {"x": make(9, 24), "weight": make(24), "bias": None, "eps": 1e-6}
    yield Case(name="no bias", arguments=arguments, grads=("x", "weight"))
    arguments = {"x": make(9, 24), "weight": make(24), "bias": make(24), "eps": 1e-6}
    yield Case(name="float32 weight", arguments=arguments, grads=names, fixed=("weight", "bias"))
    yield Case(
        name="zero-centred weight", arguments={**arguments, "zero_centered": True}, grads=names
    )


def l2_norm(make: Make) -> Iterator[Case]:
    """Cases of the L2 norm."""
    for name, x, more in _norm_inputs(make):
        yield Case(name=name, arguments={"x": x, "eps": 1e-6}, grads=("x",), **more)
    yield Case(name="heads", arguments={"x": make(5, 3, 16), "eps": 1e-6}, grads=("x",))
    yield Case(name="zeros", arguments={"x": make(3, 8) * 0, "eps": 1e-6}, grads=("x",))


def _elementwise_inputs(make: Make) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    yield "plain", make(6, 64), {}
    yield "odd sizes", make(13, 2 * 37), {}
    yield "leading dims", make(2, 3, 5, 6), {}
    yield "smallest", make(1, 2), {}
    yield "no rows", make(0, 8), {}
    yield "no columns", make(4, 0), {}
    yield "scattered", scattered(make(5, 22)), {}
    yield "slice of rows", slice_of_rows(make(5, 22)), {}
    yield "transposed", make(22, 5).t(), {}
    yield "expanded gradient", make(5, 22), {"expanded": True}
    yield "large values", make(5, 22, scale=100.0), {}
    yield "wide rows", make(3, 2 * 1100), {}
    yield "NaN", with_nan(make(5, 22)), {}


def swiglu(make: Make) -> Iterator[Case]:
    """Cases of SwiGLU."""
    for name, x, more in _elementwise_inputs(make):
        yield Case(name=name, arguments={"gate_up": x}, grads=("gate_up",), **more)


def gelu(make: Make) -> Iterator[Case]:
    """Cases of GELU."""
    for approximate in ("none", "tanh"):
        for name, x, more in _elementwise_inputs(make):
            arguments = {"x": x, "approximate": approximate}
            yield Case(
                name=f"{name}, {approximate}", arguments=arguments, grads=("x",), slack=4.0, **more
            )


def glu(make: Make) -> Iterator[Case]:
    """Cases of gated activations."""
    for name, x, more in _elementwise_inputs(make):
        yield Case(name=name, arguments={"gate_up": x}, grads=("gate_up",), slack=4.0, **more)
    for name in FORMULAS:
        arguments = {"gate_up": make(5, 14, scale=3.0), "activation": name}
        yield Case(name=name, arguments=arguments, grads=("gate_up",), slack=4.0, floor=1.0)
    # Sums to an eighth, and no limit among them, keep their side of it in every dtype.
    gate_up, bias = ((make(*shape) * 16).round() / 8 for shape in ((7, 26), (26,)))
    weights, limits = make(7).abs(), {"limit": 1.53125, "offset": 1.0}
    quick = {"gate_up": gate_up, "activation": "quick_gelu"}

    def case(name: str, arguments: dict[str, Any], *grads: str) -> Case:
        return Case(
            name=name, arguments=arguments, grads=grads, fixed=("weights",), slack=4.0, floor=1.0
        )

    everything = {**quick, "bias": bias, "weights": weights, **limits}
    yield case("as gpt-oss", {**quick, "bias": bias, **limits}, "gate_up", "bias")
    yield case("weighted rows", {**quick, "weights": weights}, "gate_up", "weights")
    yield case("everything", everything, "gate_up", "bias", "weights")
    yield case("NaN under a limit", {**everything, "gate_up": with_nan(gate_up)})
    nothing = {**everything, "gate_up": make(0, 26), "weights": make(0)}
    yield case("no rows at all", nothing, "gate_up", "bias", "weights")


def activation(make: Make) -> Iterator[Case]:
    """Cases of activations without a gate."""
    for name in FORMULAS:
        arguments = {"x": make(5, 7, scale=3.0), "activation": name}
        yield Case(name=name, arguments=arguments, grads=("x",), slack=4.0, floor=1.0)
    for name, x, more in _elementwise_inputs(make):
        arguments = {"x": x, "activation": "squared_relu"}
        yield Case(name=name, arguments=arguments, grads=("x",), slack=4.0, **more)
    x = with_nan(make(3, 5))
    for name in FORMULAS:
        yield Case(
            name=f"NaN, {name}",
            arguments={"x": x, "activation": name},
            grads=() if name == "relu" else ("x",),  # no slope is right there
            slack=4.0,
            floor=1.0,
        )
    everything = {"x": make(2, 4, 9), "bias": make(9), "weights": make(2, 4)}
    yield Case(
        name="bias and weighted rows",
        arguments=everything,
        grads=tuple(everything),
        fixed=("weights",),
        slack=4.0,
        floor=1.0,
    )
