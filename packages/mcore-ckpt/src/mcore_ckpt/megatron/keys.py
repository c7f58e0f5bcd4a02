"""Keys of sharded checkpoints, told apart: weights, optimizer state by parameter, flat buckets."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mcore_parallel.layout import TensorLayout
from mcore_parallel.mapping import Mapped, TensorMeta

MASTER = "param"
"""Optimizer state that is the fp32 master of a weight."""

_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.(?:chained_\d+\.)?state\.(?P<state>\w+?)\.(?P<name>.+)"
)
_BUCKET = re.compile(
    r"(?:chained_(?P<a>\d+)\.)?optimizer\.(?:chained_(?P<b>\d+)\.)?distributed\."
    r"dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtype>.+?)\."
    r"bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
_STACKED = re.compile(r"decoder\.layers\.(?P<rest>[a-zA-Z_].*)")
_HALF = re.compile(r"(?P<name>.+\.linear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])")
_EXPERTS = re.compile(r"(?P<start>.*\.experts\.experts)\.(?P<rest>[a-zA-Z_].*)")


@dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """A flat buffer of optimizer state.

    optimizer: which of several, one after the other. group: which model-parallel rank. buffer,
    bucket: which of that rank's. dtype: of parameters and gradients, as text.
    """

    optimizer: int
    group: int
    buffer: int
    dtype: str
    bucket: int


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The tensors of a checkpoint, sorted.

    weights: by name. states: optimizer state by its kind and the name of its parameter, "param"
    for masters. buckets: by kind and place.
    """

    weights: Mapping[str, str]
    states: Mapping[str, Mapping[str, str]]
    buckets: Mapping[str, Mapping[Bucket, str]]


def sort_keys(keys: Iterable[str], prefixes: Iterable[str] = ("model.",)) -> Keys:
    """Return the keys of a checkpoint, sorted; prefixes: what may stand before a weight's name."""
    weights: dict[str, str] = {}
    states: dict[str, dict[str, str]] = defaultdict(dict)
    buckets: dict[str, dict[Bucket, str]] = defaultdict(dict)
    for key in keys:
        if match := _BUCKET.fullmatch(key):
            place = Bucket(
                optimizer=int(match["a"] or match["b"] or 0),
                group=int(match["group"]),
                buffer=int(match["buffer"]),
                dtype=match["dtype"],
                bucket=int(match["bucket"]),
            )
            buckets[match["state"]][place] = key
        elif match := _STATE.fullmatch(key):
            kind = MASTER if match["state"] == "fp32_param" else match["state"]
            states[kind][match["name"]] = key
        elif not key.startswith(("optimizer", "chained_", "rng_state", "rerun_state")):
            name = key
            for prefix in prefixes:
                name = name.removeprefix(prefix)
            weights[name] = key
    return Keys(weights=weights, states=states, buckets=buckets)


def apart(
    named: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Iterator[tuple[str, Mapped]]:
    """Yield tensors, those that are stacked over layers or over experts taken apart.

    The gate and the rest of a gated layer may be apart, as `…_w` and `…_v`: they are joined.

    named: keys by name. metas: by key. shapes: of the parameters by name, where tensors may be
    flattened shard by shard, as older optimizer states are (`fully_sharded_model_space`).

    Raises:
        ValueError: of two such halves one is missing.
    """
    for name, whole in _with_halves(named, metas, shapes or {}):
        for layer_name, layer in _unstacked(_STACKED, "decoder.layers.{}.{}", name, whole):
            yield from _unstacked(_EXPERTS, "{start}.{}.{}", layer_name, layer)


def _with_halves(
    named: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, Mapped]]:
    halves: dict[str, dict[str, Mapped]] = defaultdict(dict)
    for name, key in named.items():
        layout = TensorLayout.whole(key, metas[key].shape)
        tensor = Mapped(_unflattened(layout, shapes.get(name)), metas[key].dtype)
        if match := _HALF.fullmatch(name):
            halves[match["name"]][match["half"]] = tensor
        else:
            yield name, tensor
    for name, both in halves.items():
        if len(both) < 2:
            raise ValueError(f"of {name}_w and {name}_v one is missing")
        layouts = [both["w"].layout, both["v"].layout]
        yield name, Mapped(TensorLayout.concat(layouts), both["w"].dtype)


def _unflattened(layout: TensorLayout, shape: tuple[int, ...] | None) -> TensorLayout:
    """Return a tensor of shards [X/x, Y/y, x·y] as the one of [X, Y]; others as they are."""
    if shape is None or len(layout.shape) != len(shape) + 1:
        return layout
    *grid, size = layout.shape
    shard = [n // max(parts, 1) for n, parts in zip(shape, grid, strict=True)]
    fits = all(parts * n == whole for parts, n, whole in zip(grid, shard, shape, strict=True))
    if not fits or math.prod(shard) != size:
        return layout
    places = [dim for i in range(len(grid)) for dim in (i, len(grid) + i)]
    return layout.reshaped((*grid, *shard)).permuted(places).reshaped(shape)


def _unstacked(
    pattern: re.Pattern[str], form: str, name: str, tensor: Mapped
) -> Iterator[tuple[str, Mapped]]:
    match = pattern.fullmatch(name)
    if match is None or not tensor.shape:
        yield name, tensor
        return
    start = match.groupdict().get("start")
    for i in range(tensor.shape[0]):
        layout = tensor.layout.slice(0, i, i + 1).reshaped(tensor.shape[1:])
        yield form.format(i, match["rest"], start=start), Mapped(layout, tensor.dtype)
