"""Copies between random layouts of random models, carried out in one process."""

import itertools
import random
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.layout import Box, Copy, TensorLayout, check_tiling, plan

Layouts = dict[int, dict[str, TensorLayout]]
Locals = dict[int, dict[str, torch.Tensor]]


def globals_of(layouts: Layouts) -> dict[str, torch.Tensor]:
    shapes = {
        f.name: f.global_shape
        for by_key in layouts.values()
        for layout in by_key.values()
        for f in layout.fragments
    }
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shapes[name], generator=generator, dtype=torch.float64)
        for name in sorted(shapes)
    }


def scatter(values: dict[str, torch.Tensor], layouts: Layouts) -> Locals:
    locals_: Locals = {}
    for rank, by_key in layouts.items():
        locals_[rank] = {key: torch.zeros(x.shape).double() for key, x in by_key.items()}
        for key, layout in by_key.items():
            for f, view in layout.views(locals_[rank][key]):
                view.copy_(values[f.name][f.box.slices])
    return locals_


def execute(copies: list[Copy], sources: Locals, targets: Locals) -> None:
    def view(tensors: Locals, copy: Copy, end: str) -> torch.Tensor:
        place = getattr(copy, end)
        flat = tensors[place.rank][place.key].view(-1)
        return flat.as_strided(copy.shape, place.strides, place.offset)

    for copy in copies:
        view(targets, copy, "target").copy_(view(sources, copy, "source"))


@st.composite
def models(draw: st.DrawFn) -> dict[str, int]:
    return {
        "q_heads": draw(st.sampled_from([4, 8])),
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "head": draw(st.integers(1, 3)),
        "hidden": draw(st.integers(1, 5)),
        "vocab": draw(st.integers(3, 11)),
        "ffn": draw(st.integers(4, 7)),
    }


def _spans(size: int, parts: int) -> list[tuple[int, int]]:
    """Uneven: the first parts take the ceiling, the last what is left, possibly nothing."""
    step = -(-size // parts)
    return [(min(size, i * step), min(size, (i + 1) * step)) for i in range(parts)]


def model_layouts(model: dict[str, int], tp: int, rank: int, style: str) -> dict[str, TensorLayout]:
    h, d = model["hidden"], model["head"]

    def rows(name: str, size: int, a: int, b: int) -> TensorLayout:
        return TensorLayout.box(name, (size, h), Box((a, 0), (b - a, h)))

    q_rows = model["q_heads"] * d
    q = rows("q", q_rows, q_rows // tp * rank, q_rows // tp * (rank + 1))
    copies = max(1, tp // model["kv_heads"])
    size = model["kv_heads"] * d
    kv_rows = size * copies // tp
    start = rank // copies * kv_rows
    k, v = (
        rows(name, size, start, start + kv_rows).replicated(rank % copies, copies) for name in "kv"
    )
    groups = kv_rows // d
    if style == "grouped":
        fused = TensorLayout.interleaved([q, k, v], [q.shape[0] // groups, d, d])
    else:
        fused = TensorLayout.concat([q, k, v])
    vocab, ffn = _spans(model["vocab"], tp)[rank], _spans(model["ffn"], tp)[rank]
    table = rows("embedding", model["vocab"], *vocab)
    padding = -(-model["vocab"] // tp) - table.shape[0]
    table = TensorLayout.concat([table, TensorLayout.padding((padding, h))])
    gate_up = [rows(name, model["ffn"], *ffn) for name in ("gate", "up")]
    down = TensorLayout.box("down", (h, model["ffn"]), Box((0, ffn[0]), (h, ffn[1] - ffn[0])))
    tied = style == "tied"
    layouts = {
        "qkv": fused,
        "embedding": table.replicated(0, 2) if tied else table,
        "gate_up": TensorLayout.interleaved(gate_up, [1, 1])
        if style == "grouped" and gate_up[0].shape[0]
        else TensorLayout.concat(gate_up),
        "down": down.transposed() if style == "transposed" else down,
        "norm": TensorLayout.whole("norm", (h,)).replicated(rank, tp),
    }
    if tied:
        layouts["head"] = table.replicated(1, 2)
    return layouts


@st.composite
def rank_layouts(draw: st.DrawFn, model: dict[str, int]) -> Layouts:
    """The model over tp × dp ranks: replicated, cut into flat ranges, or sliced, over dp."""
    tp, dp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (4, 2)]))
    style = draw(st.sampled_from(["plain", "grouped", "transposed", "tied"]))
    sharding = draw(st.sampled_from(["replicated", "flat", "sliced"]))
    ranks = draw(st.permutations(range(tp * dp)))
    result: Layouts = {}
    for t in range(tp):
        layouts = model_layouts(model, tp, t, style)
        cuts: dict[str, list[int]] = {}
        for key, layout in layouts.items():
            end = layout.numel if sharding == "flat" else layout.shape[0]
            inner = sorted(draw(st.integers(0, end)) for _ in range(dp - 1))
            cuts[key] = [0, *inner, end]
        for r in range(dp):
            mine = {}
            for key, layout in layouts.items():
                a, b = cuts[key][r], cuts[key][r + 1]
                if sharding == "flat":
                    mine[key] = layout.flat_range(a, b)
                elif sharding == "sliced":
                    mine[key] = layout.slice(0, a, b)
                else:
                    mine[key] = layout.replicated(r, dp)
            result[ranks[t * dp + r]] = mine
    return result


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_layout_turns_into_any_other_bit_for_bit(data: st.DataObject) -> None:
    model = data.draw(models())
    sources, targets = data.draw(rank_layouts(model)), data.draw(rank_layouts(model))
    for layouts in (sources, targets):
        check_tiling(x for by_key in layouts.values() for x in by_key.values())
    values = globals_of(sources)
    expected = scatter(values, targets)
    found: Locals = {
        rank: {key: torch.zeros_like(x) for key, x in by_key.items()}
        for rank, by_key in expected.items()
    }
    copies = plan(sources, targets)
    execute(copies, scatter(values, sources), found)
    for rank, by_key in expected.items():
        for key, local in by_key.items():
            assert torch.equal(found[rank][key], local), (rank, key)
    needed = sum(x.covered for by_key in targets.values() for x in by_key.values())
    assert sum(copy.numel for copy in copies) == needed, "no element is copied twice"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_gathering_the_primary_fragments_gives_the_original(data: st.DataObject) -> None:
    sources = data.draw(rank_layouts(data.draw(models())))
    values = globals_of(sources)
    whole = {0: {name: TensorLayout.whole(name, value.shape) for name, value in values.items()}}
    primary = {
        rank: {key: layout.primary() for key, layout in by_key.items()}
        for rank, by_key in sources.items()
    }
    result = {0: {name: torch.zeros_like(value) for name, value in values.items()}}
    execute(plan(primary, whole), scatter(values, sources), result)
    assert all(torch.equal(result[0][name], value) for name, value in values.items())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_own_elements_come_from_the_own_rank(data: st.DataObject) -> None:
    model = data.draw(models())
    sources, targets = data.draw(rank_layouts(model)), data.draw(rank_layouts(model))

    def elements(layouts: Layouts, rank: int) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for layout in layouts.get(rank, {}).values():
            for f in layout.fragments:
                index = torch.arange(Box.whole(f.global_shape).numel).view(f.global_shape)
                found.setdefault(f.name, set()).update(index[f.box.slices].flatten().tolist())
        return found

    copies = plan(sources, targets)
    for rank in targets:
        have = elements(sources, rank)
        for copy in copies:
            if copy.target.rank == rank and copy.source.rank != rank:
                index = torch.arange(Box.whole(shapes_of(model)[copy.name]).numel)
                box = index.view(shapes_of(model)[copy.name])[copy.box.slices]
                assert not set(box.flatten().tolist()) & have.get(copy.name, set())


def shapes_of(model: dict[str, int]) -> dict[str, tuple[int, ...]]:
    layouts = model_layouts(model, 1, 0, "plain")
    return {f.name: f.global_shape for x in layouts.values() for f in x.fragments}


def test_replicas_share_the_sending_evenly() -> None:
    """Eight ranks hold everything; eight others need it: each sends the same amount."""
    names = [f"w{i}" for i in range(16)]
    sources = {
        r: {n: TensorLayout.whole(n, (4, 5)).replicated(r, 8) for n in names} for r in range(8)
    }
    targets = {r: {n: TensorLayout.whole(n, (4, 5)) for n in names} for r in range(8, 16)}
    sent = Counter(copy.source.rank for copy in plan(sources, targets))
    assert sent == dict.fromkeys(range(8), 16)


def test_a_plan_does_not_depend_on_the_order_of_the_mappings() -> None:
    """Also where one rank holds a tensor under two keys."""
    names = [f"w{i}" for i in range(6)]
    whole = {n: TensorLayout.whole(n, (4, 5)) for n in names}
    sources = {
        r: {
            f"{use}/{n}": layout.replicated(2 * r + i, 6)
            for n, layout in whole.items()
            for i, use in enumerate(("first", "tied"))
        }
        for r in range(3)
    }
    targets = {
        r: {n: TensorLayout.whole(n, (4, 5)).flat_range(2 * r, 2 * r + 9) for n in names}
        for r in range(2, 5)
    }
    expected = plan(sources, targets)
    shuffle = random.Random(1)
    for _ in range(3):
        mixed = []
        for side in (sources, targets):
            ranks = shuffle.sample(sorted(side), len(side))
            mixed.append(
                {r: dict(shuffle.sample(list(side[r].items()), len(side[r]))) for r in ranks}
            )
        assert plan(*mixed) == expected


def test_replicas_cut_differently_are_combined_without_copying_twice() -> None:
    """Two incomplete sources that overlap cover a target only together."""
    whole = TensorLayout.whole("w", (6, 4))
    sources = {0: {"a": whole.flat_range(0, 14)}, 1: {"b": whole.slice(0, 2, 6)}}
    for rank in (0, 1, 2):
        copies = plan(sources, {rank: {"c": whole}})
        assert sum(copy.numel for copy in copies) == 24
        own = sum(copy.numel for copy in copies if copy.source.rank == rank)
        assert own == {0: 14, 1: 16, 2: 0}[rank]
        value = torch.arange(24.0, dtype=torch.float64).view(6, 4)
        result = {rank: {"c": torch.zeros(6, 4).double()}}
        execute(copies, scatter({"w": value}, sources), result)
        assert torch.equal(result[rank]["c"], value)


def test_a_region_that_nobody_holds_is_an_error_that_names_it() -> None:
    whole = TensorLayout.whole("layers.2.w", (6, 4))
    half = {0: {"a": whole.slice(0, 0, 3)}}
    with pytest.raises(ValueError, match=r"layers.2.w \[6, 4\]: no source holds .* \[3:6, 0:4\]"):
        plan(half, {0: {"a": whole}})
    with pytest.raises(ValueError, match=r"layers.3.w: no source holds this tensor"):
        plan(half, {0: {"a": TensorLayout.whole("layers.3.w", (6, 4))}})
    other = {0: {"a": TensorLayout.whole("layers.2.w", (6, 5))}}
    with pytest.raises(ValueError, match=r"layers.2.w: global shapes \[6, 4\] and \[6, 5\] differ"):
        plan(half, other)
    with pytest.raises(ValueError, match=r"layers.2.w: global shapes .* differ"):
        plan({**half, 1: other[0]}, half)


def test_scalars_and_empty_tensors_have_plans_too() -> None:
    layouts = {"s": TensorLayout.whole("s", ()), "e": TensorLayout.whole("e", (0, 3))}
    (copy,) = plan({0: layouts}, {1: layouts})
    assert (copy.name, copy.shape, copy.numel) == ("s", (), 1)


def test_ten_thousand_tensors_from_row_to_column_shards_are_planned_in_seconds() -> None:
    def cut(boxes: list[Box]) -> Layouts:
        names = [f"layers.{i}.w" for i in range(10_000)]
        return {
            r: {name: TensorLayout.box(name, (8, 8), box) for name in names}
            for r, box in enumerate(boxes)
        }

    sources = cut([Box((0, 0), (4, 8)), Box((4, 0), (4, 8))])
    targets = cut([Box((0, 0), (8, 4)), Box((0, 4), (8, 4))])
    start = time.process_time()
    assert len(plan(sources, targets)) == 40_000
    assert time.process_time() - start < 10  # about 0.6 s


def test_a_grid_of_ten_thousand_boxes_is_gathered_in_seconds() -> None:
    grid = itertools.product(range(100), range(100))
    sources = {
        rank: {"g": TensorLayout.box("g", (300, 300), Box((3 * i, 3 * j), (3, 3)))}
        for rank, (i, j) in enumerate(grid)
    }
    start = time.process_time()
    copies = plan(sources, {0: {"g": TensorLayout.whole("g", (300, 300))}})
    assert len(copies) == 10_000
    assert time.process_time() - start < 10  # about 0.3 s
