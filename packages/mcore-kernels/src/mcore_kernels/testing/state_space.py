"""The arguments on which operators of state-space layers are compared, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.testing.case import Case, Make, ends, scattered, slice_of_rows, with_nan


def causal_conv1d(make: Make) -> Iterator[Case]:
    """Cases of the causal convolution."""

    def case(
        name: str,
        lengths: list[int],
        *,
        channels: int = 6,
        width: int = 4,
        bias: bool = True,
        states: bool = False,
        spare: int = 0,
        change: Callable[[Tensor], Tensor] = lambda x: x,
        arguments: dict[str, Any] | None = None,
        **more: Any,
    ) -> Case:
        given = {"bias": make(channels)} if bias else {}
        if states:
            given["initial_states"] = make(len(lengths), width - 1, channels)
        x, weight = change(make(sum(lengths) + spare, channels)), make(channels, width)
        return Case(
            name=name,
            arguments={
                "x": x,
                "weight": weight,
                "cu_seqlens": ends(lengths),
                **given,
                **(arguments or {}),
            },
            grads=("x", "weight", *given),
            floor=1.0,
            **more,
        )

    ragged = [5, 1, 0, 7, 7, 3]
    yield case("uniform", [8, 8], arguments={"uniform": (2, 8), "silu": True})
    yield case("uniform, from states", [6, 6], states=True, arguments={"uniform": (2, 6)})
    yield case("ragged", ragged)
    yield case("ragged with silu", ragged, arguments={"silu": True})
    yield case("ragged, from states", ragged, states=True, arguments={"silu": True})
    yield case("no bias", ragged, bias=False)
    yield case("one tap", ragged, width=1, states=True)
    yield case("more taps than tokens", [2, 1, 3], width=9, states=True)
    yield case("one token each, from states", [1, 1, 1], states=True)
    yield case("one channel", [7], channels=1)
    yield case("rows of no document", [3, 4], spare=2, arguments={"silu": True})
    yield case("slice of rows", [4, 5], change=slice_of_rows)
    yield case("scattered", [4, 5], change=scattered)
    yield case("expanded gradient", [4, 5], expanded=True)
    yield case("large values", [4, 5], change=lambda x: 1e3 * x)
    yield case("no document", [], states=True)
    yield case("empty documents", [0, 0], states=True)
    yield case("NaN in another document", [4, 6], change=with_nan, arguments={"silu": True})


def ssd_scan(make: Make) -> Iterator[Case]:
    """Cases of the state-space scan."""

    def case(
        name: str,
        lengths: list[int],
        *,
        heads: int = 4,
        groups: int = 2,
        sizes: tuple[int, int] = (3, 5),
        without: tuple[str, ...] = (),
        spare: int = 0,
        change: Callable[[Tensor], Tensor] = lambda x: x,
        dt_scale: float = 1.0,
        arguments: dict[str, Any] | None = None,
        **more: Any,
    ) -> Case:
        rows = sum(lengths) + spare
        given = {
            "x": change(make(rows, heads, sizes[0])),
            "dt": change(make(rows, heads, scale=dt_scale)),
            "a_log": make(heads),
            "b": change(make(rows, groups, sizes[1])),
            "c": change(make(rows, groups, sizes[1])),
            "d": make(heads),
            "dt_bias": make(heads),
            "initial_states": make(len(lengths), heads, *sizes),
        }
        given = {name: value for name, value in given.items() if name not in without}
        return Case(
            name=name,
            arguments={
                **given,
                "cu_seqlens": ends(lengths),
                "max_seqlen": max(lengths, default=0),
                "chunk_size": 4,
                **(arguments or {}),
            },
            grads=tuple(given),
            fixed=("a_log", "d", "dt_bias", "initial_states"),
            floor=1.0,
            slack=4.0,
            **more,
        )

    ragged, bare = [5, 1, 0, 13, 8, 3], ("initial_states",)
    yield case("uniform", [8, 8], arguments={"uniform": (2, 8)})
    yield case("uniform, chunks that do not fit", [7, 7], arguments={"uniform": (2, 7)})
    yield case("uniform, from nothing", [9], without=bare, arguments={"uniform": (1, 9)})
    yield case("ragged", ragged)
    yield case("ragged, from nothing", ragged, without=bare)
    yield case("chunk of one", ragged, arguments={"chunk_size": 1})
    yield case("chunk longer than all", ragged, arguments={"chunk_size": 64})
    yield case("one group", ragged, groups=1)
    yield case("a group for each head", ragged, groups=4)
    yield case("one head", [6], heads=1, groups=1, sizes=(1, 1))
    yield case("no skip, no bias", ragged, without=("d", "dt_bias"))
    yield case("limits", ragged, arguments={"dt_limits": (0.5, 0.9)})
    yield case("large steps", ragged, dt_scale=20.0)
    yield case("decoding", [1, 1, 1])
    yield case("prefill and decoding", [1, 9, 1, 1])
    yield case("rows of no document", [3, 4], spare=2)
    yield case("rows of no document behind chunks", [3, 6], spare=9)
    yield case("slice of rows", [4, 5], change=slice_of_rows)
    yield case("scattered", [4, 5], change=scattered)
    yield case("expanded gradient", [4, 5], expanded=True)
    yield case("no document", [])
    yield case("empty documents", [0, 0])
    nan = case("NaN", [5, 6, 3])
    x = nan.arguments["x"].clone()
    x[5, 1, 2] = torch.nan  # the first row of a document: the others stay as they are
    yield Case(name="NaN in another document", arguments={**nan.arguments, "x": x}, grads=())


def gated_delta_rule(make: Make) -> Iterator[Case]:
    """Cases of the gated delta rule; keys of length 1, as layers give them."""

    def case(
        name: str,
        lengths: list[int],
        *,
        heads: tuple[int, int] = (2, 4),
        sizes: tuple[int, int] = (5, 3),
        states: bool = True,
        spare: int = 0,
        change: Callable[[Tensor], Tensor] = lambda x: x,
        decay: float = 0.3,
        arguments: dict[str, Any] | None = None,
        **more: Any,
    ) -> Case:
        rows = sum(lengths) + spare
        key = make(rows, heads[0], sizes[0])
        given = {
            "q": change(make(rows, heads[0], sizes[0])),
            "k": change(key / key.norm(dim=-1, keepdim=True)),
            "v": change(make(rows, heads[1], sizes[1])),
            "g": -make(rows, heads[1], scale=decay).abs(),
            "beta": change(make(rows, heads[1]).sigmoid()),
        }
        if states:
            given["initial_states"] = make(len(lengths), heads[1], *sizes)
        return Case(
            name=name,
            arguments={
                **given,
                "cu_seqlens": ends(lengths),
                "max_seqlen": max(lengths, default=0),
                "chunk_size": 4,
                **(arguments or {}),
            },
            grads=tuple(given),
            fixed=("g", "initial_states"),
            floor=1.0,
            slack=4.0,
            **more,
        )

    ragged = [5, 1, 0, 13, 8, 3]
    yield case("uniform", [8, 8], arguments={"uniform": (2, 8)})
    yield case("uniform, chunks that do not fit", [7, 7], arguments={"uniform": (2, 7)})
    yield case("uniform, from nothing", [9], states=False, arguments={"uniform": (1, 9)})
    yield case("ragged", ragged)
    yield case("ragged, from nothing", ragged, states=False)
    yield case("chunk of one", ragged, arguments={"chunk_size": 1})
    yield case("chunk longer than all", ragged, arguments={"chunk_size": 64})
    yield case("one key head", ragged, heads=(1, 3))
    yield case("a key head for each", ragged, heads=(3, 3), sizes=(2, 6))
    yield case("one head", [6], heads=(1, 1), sizes=(1, 1))
    yield case("own scale", [6], arguments={"scale": 0.7})
    yield case("no decay", ragged, decay=0.0)
    yield case("fast decay", ragged, decay=30.0)
    yield case("decoding", [1, 1, 1])
    yield case("prefill and decoding", [1, 9, 1, 1])
    yield case("rows of no document", [3, 4], spare=2)
    yield case("rows of no document behind chunks", [3, 6], spare=9)
    yield case("slice of rows", [4, 5], change=slice_of_rows)
    yield case("scattered", [4, 5], change=scattered)
    yield case("expanded gradient", [4, 5], expanded=True)
    yield case("no document", [])
    yield case("empty documents", [0, 0])
    nan = case("NaN", [5, 6, 3])
    v = nan.arguments["v"].clone()
    v[5, 1, 2] = torch.nan  # the first row of a document: the others stay as they are
    yield Case(name="NaN in another document", arguments={**nan.arguments, "v": v}, grads=())
