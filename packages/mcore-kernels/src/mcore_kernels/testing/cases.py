"""The arguments on which implementations are compared, in float64; the suite casts them.

Odd sizes, large values, nothing at all, tensors that do not lie in one piece, and NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.testing import dense, moe, quant, quant_grouped, state_space, step
from mcore_kernels.testing.case import Case, Make, ends, scattered, slice_of_rows, with_nan


def cases(op: str, *, seed: int = 0) -> list[Case]:
    """The cases of an operator; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    return list(_CASES[op](make))


def _rope(make: Make) -> Iterator[Case]:
    def case(name: str, q: Tensor, k: Tensor, rotary: int, **more: Any) -> Iterator[Case]:
        angle = make(q.shape[0], rotary // 2, scale=3.0)
        for interleaved in (False, True):
            arguments = {"q": q, "k": k, "cos": angle.cos(), "sin": angle.sin()}
            yield Case(
                name=f"{name}, interleaved" if interleaved else name,
                arguments={**arguments, "interleaved": interleaved},
                grads=("q", "k"),
                fixed=("cos", "sin"),
                **more,
            )

    yield from case("plain", make(4, 4, 16), make(4, 2, 16), 16)
    yield from case("partial", make(3, 3, 20), make(3, 1, 20), 12)
    yield from case("smallest", make(1, 1, 2), make(1, 1, 2), 2)
    yield from case("no tokens", make(0, 2, 8), make(0, 1, 8), 8)
    yield from case("scattered", scattered(make(2, 2, 10)), scattered(make(2, 2, 10)), 10)
    qkv = make(3, 4, 8)
    yield from case("parts of one tensor", qkv[:, :3], qkv[:, 3:], 8)
    yield from case("expanded gradient", make(3, 2, 8), make(3, 1, 8), 4, expanded=True)
    yield from case("NaN", with_nan(make(2, 2, 8)), make(2, 2, 8), 6)


def _attention(make: Make) -> Iterator[Case]:
    def case(
        name: str,
        lengths_q: list[int],
        lengths_k: list[int] | None = None,
        *,
        heads: tuple[int, int] = (2, 2),
        sizes: tuple[int, int] = (8, 8),
        spare: int = 0,
        change: Callable[[Tensor], Tensor] = lambda x: x,
        scale: float = 1.0,
        arguments: dict[str, Any] | None = None,
        **more: Any,
    ) -> Case:
        lengths_k = lengths_q if lengths_k is None else lengths_k
        rows_q, rows_k = sum(lengths_q) + spare, sum(lengths_k) + spare
        return Case(
            name=name,
            arguments={
                "q": change(make(rows_q, heads[0], sizes[0], scale=scale)),
                "k": change(make(rows_k, heads[1], sizes[0])),
                "v": change(make(rows_k, heads[1], sizes[1])),
                "cu_seqlens_q": ends(lengths_q),
                "cu_seqlens_k": ends(lengths_k),
                "max_seqlen_q": max(lengths_q, default=0),
                "max_seqlen_k": max(lengths_k, default=0),
                **(arguments or {}),
            },
            grads=("q", "k", "v", *(["sinks"] if arguments and "sinks" in arguments else [])),
            floor=1.0,
            **more,
        )

    ragged = [5, 1, 0, 7, 7, 3]
    yield case("uniform", [8, 8], arguments={"uniform": (2, 8)})
    yield case("uniform, not causal", [8, 8], arguments={"uniform": (2, 8), "causal": False})
    yield case("uniform window", [9], arguments={"uniform": (1, 9), "window": 3})
    yield case("longer than a block", [70], heads=(1, 1))
    yield case("ragged", ragged)
    yield case("ragged, not causal", ragged, arguments={"causal": False})
    yield case("ragged window", ragged, arguments={"window": 2})
    yield case("window, not causal", ragged, arguments={"window": 3, "causal": False})
    yield case("window of one", ragged, arguments={"window": 1})
    yield case("window wider than all", ragged, arguments={"window": 99})
    yield case("grouped heads", ragged, heads=(6, 2))
    yield case("one kv head", [4, 6], heads=(3, 1), sizes=(16, 16))
    yield case("wider values", ragged, sizes=(8, 24))
    yield case("narrower values, odd sizes", ragged, sizes=(13, 5))
    yield case("decoding", [1, 1, 1], [9, 4, 1], heads=(4, 2))
    yield case("decoding in a window", [1, 1, 1], [9, 4, 1], arguments={"window": 4})
    yield case("prefill behind a cache", [3, 4, 2], [9, 4, 7])
    yield case("behind a cache, in a window", [3, 4], [9, 6], arguments={"window": 3})
    yield case("more queries than keys", [5, 3], [2, 0])
    yield case("more queries, window", [7], [2], arguments={"window": 2, "causal": False})
    yield case("rows of no segment", [3, 4], spare=2)
    yield case("sinks", [5, 1, 4], heads=(4, 2), arguments={"sinks": make(4)})
    blind = {"sinks": make(2), "window": 2}
    yield case("sinks, queries that see nothing", [5, 3], [2, 0], arguments=blind)
    yield case("soft cap", [5, 1, 4], arguments={"softcap": 1.5})
    capped = {"softcap": 2.0, "sinks": make(2), "window": 3}
    yield case("soft cap, sinks, window", [3, 4], [9, 6], sizes=(8, 5), arguments=capped)
    yield case("own scale", [6], arguments={"scale": 0.3})
    yield case("parts of one tensor", [4, 5], change=slice_of_rows)
    yield case("scattered", [4, 5], change=scattered)
    yield case("expanded gradient", [4, 5], expanded=True)
    yield case("no segment", [])
    yield case("empty segments", [0, 0])
    yield case("sharp scores", [12], scale=20.0, slack=16.0)
    nan = case("NaN", [6])
    yield Case(
        name="NaN",
        arguments={**nan.arguments, "q": with_nan(nan.arguments["q"])},
        grads=(),
    )
    yield case("heads of 64", [9, 5], heads=(4, 2), sizes=(64, 64))
    yield case("heads of 128, window", [17], sizes=(128, 128), arguments={"window": 6})


def _paged_attention(make: Make) -> Iterator[Case]:
    def case(
        name: str,
        new: list[int],
        contexts: list[int],
        *,
        page: int = 4,
        heads: tuple[int, int] = (4, 2),
        sizes: tuple[int, int] = (8, 8),
        spare: int = 0,
        fp8: bool = False,
        arguments: dict[str, Any] | None = None,
        **more: Any,
    ) -> Case:
        pages = [-(-length // page) for length in contexts]
        order = make(sum(pages) + 2).argsort().tolist()
        table = torch.full((len(contexts), max(pages, default=0) + 1), 10**6, dtype=torch.int32)
        for row, count in zip(table, pages, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        pool = (sum(pages) + 2, page, heads[1])
        caches = {"key_cache": make(*pool, sizes[0]), "value_cache": make(*pool, sizes[1])}
        if fp8:
            caches = {name: x.to(torch.float8_e4m3fn) for name, x in caches.items()}
        return Case(
            name=name,
            arguments={
                "q": make(sum(new) + spare, heads[0], sizes[0]),
                **caches,
                "block_table": table,
                "context_lengths": torch.tensor(contexts, dtype=torch.int32),
                "cu_seqlens_q": ends(new),
                "max_seqlen_q": max(new, default=0),
                **(arguments or {}),
            },
            grads=(),
            fixed=("key_scale", "value_scale"),
            floor=1.0,
            **more,
        )

    yield case("decoding", [1, 1, 1], [9, 4, 1])
    yield case("one kv head, odd sizes", [1, 1], [7, 10], heads=(3, 1), sizes=(13, 5))
    yield case("chunk of a prompt", [6, 3], [6, 11])
    yield case("decoding and chunks", [1, 5, 0, 1], [8, 9, 3, 5])
    yield case("window", [1, 4], [9, 9], arguments={"window": 3})
    yield case("soft cap and sinks", [2, 1], [5, 3], arguments={"softcap": 1.5, "sinks": make(4)})
    factors = {"key_scale": make(2).abs() + 0.5, "value_scale": make(2).abs() + 0.5}
    yield case("float8 cache", [1, 3], [9, 6], fp8=True, arguments=factors)
    yield case("float8 cache without scales", [1], [6], fp8=True)
    yield case("pages of one", [1, 2], [3, 2], page=1)
    yield case("one large page", [2], [70], page=128, heads=(2, 2))
    yield case("more queries than keys", [3], [2])
    yield case("rows of no sequence", [1, 2], [4, 3], spare=2)
    yield case("own scale", [2], [5], arguments={"scale": 0.3})
    yield case("no sequence", [], [])
    nan = case("NaN", [1, 1], [5, 6])
    broken = {**nan.arguments, "q": with_nan(nan.arguments["q"])}
    yield Case(name="NaN", arguments=broken, grads=(), floor=1.0)


def _cross_entropy(make: Make) -> Iterator[Case]:
    def case(name: str, logits: Tensor, cuts: list[int], smoothing: float = 0.0) -> Case:
        size = logits.shape[1]
        on_all = smoothing / (size - 1)
        return Case(
            name=name,
            arguments={
                "logits": logits,
                "labels": torch.arange(logits.shape[0]) * 7 % size,
                "cuts": cuts,
                "on_target": 1.0 - smoothing - on_all,
                "on_all": on_all,
            },
            grads=(),
        )

    yield case("one shard", make(4, 31), [])
    yield case("two shards", make(4, 31), [16])
    yield case("uneven shards, one of them empty", make(4, 31), [4, 4, 19])
    yield case("smoothing", make(4, 31), [16], 0.1)
    yield case("large logits", make(4, 31, scale=1e3), [16], 0.1)
    yield case("one column each", make(5, 3), [1, 2])
    yield case("no tokens", make(0, 31), [16])
    yield case("scattered", scattered(make(4, 31)), [16], 0.1)
    masked = make(4, 31)
    masked[:, 5] = -torch.inf
    yield case("a class ruled out", masked, [16])
    yield case("NaN", with_nan(make(4, 31)), [16])


_CASES: dict[str, Callable[[Make], Iterator[Case]]] = {
    "linear": dense.linear,
    "rms_norm": dense.rms_norm,
    "layer_norm": dense.layer_norm,
    "add_rms_norm": dense.add_rms_norm,
    "l2_norm": dense.l2_norm,
    "glu": dense.glu,
    "activation": dense.activation,
    "swiglu": dense.swiglu,
    "gelu": dense.gelu,
    "rope": _rope,
    "attention": _attention,
    "paged_attention": _paged_attention,
    "cross_entropy": _cross_entropy,
    "moe_route": moe.moe_route,
    "moe_permute": moe.moe_permute,
    "grouped_linear": moe.grouped_linear,
    "causal_conv1d": state_space.causal_conv1d,
    "ssd_scan": state_space.ssd_scan,
    "gated_delta_rule": state_space.gated_delta_rule,
    "quantize": quant.quantize,
    "fp8_matmul": quant.fp8_matmul,
    "fp8_grouped": quant_grouped.fp8_grouped,
    "adam": step.adam,
    "grad_stats": step.grad_stats,
    "sample": step.sample,
}
