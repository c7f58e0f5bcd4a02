"""Each operator on real values, in both directions, and what it refuses."""

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mcore_parallel.layout import Box
from mcore_parallel.mapping import (
    Concat,
    Drop,
    Exact,
    Inward,
    MappedReader,
    Operator,
    Rename,
    Reshape,
    Split,
    Stack,
    TensorMapping,
    TensorMeta,
    Transpose,
    Unstack,
    evaluate,
)

Values = dict[str, Tensor]


def metas(values: Values) -> dict[str, TensorMeta]:
    return {name: TensorMeta(tuple(v.shape), v.dtype) for name, v in values.items()}


def numbered(*shape: int, start: int = 0) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + start


def check(operators: list[Operator], theirs: Values, ours: Values) -> None:
    """Forward gives ours, inverse gives theirs, bit for bit and in their dtypes."""
    mapping = TensorMapping(operators)
    there = evaluate(mapping.forward(metas(theirs)), theirs)
    assert there.keys() == ours.keys()
    for name, value in ours.items():
        assert there[name].dtype == value.dtype
        assert torch.equal(there[name], value), name
    back = evaluate(mapping.inverse(metas(ours)), ours)
    assert back.keys() == theirs.keys()
    for name, value in theirs.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value), name


def test_rename_with_placeholders_choices_and_absent_tensors() -> None:
    theirs = {
        "model.layers.0.attn.q_proj.weight": numbered(2, 3),
        "model.layers.11.attn.k_proj.bias": numbered(4),
        "model.layers.1.attn.q_norm.weight": numbered(5),
        "other": torch.ones(()),
    }
    ours = {
        "layers.0.attention.q.weight": numbered(2, 3),
        "layers.11.attention.k.bias": numbered(4),
        "layers.1.attention.q_norm.weight": numbered(5),
        "other": torch.ones(()),
    }
    check(
        [
            Rename(
                "model.layers.{layer}.attn.{part:q|k|v}_proj.{kind}",
                "layers.{layer}.attention.{part}.{kind}",
            ),
            Rename(
                "model.layers.{layer}.attn.{part:q_norm|k_norm}.weight",
                "layers.{layer}.attention.{part}.weight",
            ),
            Rename("model.absent.{layer}", "absent.{layer}"),
        ],
        theirs,
        ours,
    )


def test_names_may_change_places() -> None:
    a, b = numbered(2), numbered(3)
    check([Rename("{x:a|b}.w", "{x}.v")], {"a.w": a, "b.w": b}, {"a.v": a, "b.v": b})


def test_transpose_permutes_and_undoes_it() -> None:
    value = numbered(2, 3, 4)
    check([Transpose("x.{i}", (2, 0, 1))], {"x.1": value}, {"x.1": value.permute(2, 0, 1)})
    matrix = numbered(3, 5).bfloat16()
    check([Transpose("m")], {"m": matrix}, {"m": matrix.t()})


def test_split_and_concat_are_each_others_inverse() -> None:
    fused = numbered(8, 3)
    parts = {f"layers.2.{p}": v for p, v in zip("qkv", fused.split((4, 2, 2)), strict=True)}
    names = tuple(f"layers.{{i}}.{part}" for part in "qkv")
    check([Split("fused.{i}", names, sizes=(4, 2, 2))], {"fused.2": fused}, parts)
    check([Concat(names, "fused.{i}", sizes=(4, 2, 2))], parts, {"fused.2": fused})
    halves = {"gate": fused[:, :1], "up": fused[:, 1:2], "down": fused[:, 2:]}
    check([Split("w", ("gate", "up", "down"), dim=1)], {"w": fused}, halves)


def test_stack_and_unstack_number_the_new_dimension() -> None:
    items = {f"l.3.experts.{e}.w": numbered(2, 3, start=e) for e in range(11)}
    whole = {"l.3.moe": torch.stack(list(items.values()))}
    check([Stack("l.{l}.experts.{expert}.w", "l.{l}.moe")], items, whole)
    check([Unstack("l.{l}.moe", "l.{l}.experts.{expert}.w")], whole, items)
    last = {"l.3.moe": torch.stack(list(items.values()), -1)}
    check([Stack("l.{l}.experts.{e}.w", "l.{l}.moe", over="e", dim=2)], items, last)


def test_a_fused_weight_per_head_comes_apart_by_reshaping() -> None:
    heads, size, hidden = 4, 2, 5
    fused = numbered(heads * 3 * size, hidden)
    q, k, v = fused.view(heads, 3, size, hidden).unbind(1)
    operators: list[Operator] = [
        Reshape("qkv", theirs=(heads * 3 * size, hidden), ours=(heads, 3, size, hidden)),
        Split("qkv", ("q", "k", "v"), dim=1),
        *(
            Reshape(part, theirs=(heads, 1, size, hidden), ours=(heads * size, hidden))
            for part in "qkv"
        ),
    ]
    flat = {name: part.reshape(-1, hidden) for name, part in zip("qkv", (q, k, v), strict=True)}
    check(operators, {"qkv": fused}, flat)
    resolved = TensorMapping(operators).forward(metas({"qkv": fused}))
    assert len(resolved.regions("k")) == heads


def decode(tensors: object) -> tuple[Tensor, ...]:
    weight, scale = tensors  # type: ignore[misc]
    return (weight.float() * scale,)


def encode(tensors: object) -> tuple[Tensor, ...]:
    (value,) = tensors  # type: ignore[misc]
    scale = torch.full((1,), 2.0, device=value.device)
    return (value / scale).to(torch.float8_e4m3fn), scale


def test_an_exact_function_of_whole_tensors_within_a_chain() -> None:
    raw = numbered(4, 2).to(torch.float8_e4m3fn)
    theirs = {"fused.w": torch.cat([raw, raw]), "fused.s": torch.full((1,), 2.0)}
    ours = {"a": (raw.float() * 2).t(), "b": (raw.float() * 2).t()}
    operators: list[Operator] = [
        Exact(("fused.w", "fused.s"), ("fused",), decode, encode),
        Transpose("fused"),
        Split("fused", ("a", "b"), dim=1),
    ]
    check(operators, theirs, ours)
    resolved = TensorMapping(operators).forward(metas(theirs))
    assert not resolved.is_plain("a")
    assert resolved.sources("a") == ("fused.w", "fused.s")
    calls = []

    def read(name: str, box: Box) -> Tensor:
        calls.append((name, box.numel))
        return theirs[name][box.slices].clone()

    reader = MappedReader(resolved, read)
    assert torch.equal(reader.read("a", Box((1, 0), (1, 3))), ours["a"][1:2, :3])
    assert torch.equal(reader.read("b"), ours["b"])
    assert calls == [("fused.w", 16), ("fused.s", 1)]  # once, whole


def test_dropped_tensors_are_not_made_again_and_may_have_to_repeat_another() -> None:
    theirs = {"head": numbered(3, 2), "embedding": numbered(3, 2), "inv_freq.3": torch.ones(2)}
    mapping = TensorMapping([Drop("inv_freq.{i}"), Drop("head", repeats="embedding")])
    resolved = mapping.forward(metas(theirs))
    assert list(resolved.tensors) == ["embedding"]
    assert sorted(resolved.dropped) == ["head", "inv_freq.3"]
    pair = resolved.repeats["head"]
    for head, same in ((theirs["embedding"], True), (theirs["embedding"] + 1, False)):
        values = {**theirs, "head": head}
        reader = MappedReader(resolved, lambda name, box, v=values: v[name][box.slices])
        assert reader.same(*pair) is same
        assert reader.same(*pair, max_elements=2) is same
    assert list(mapping.inverse(metas({"embedding": numbered(3, 2)})).tensors) == ["embedding"]
    with pytest.raises(ValueError, match="embedding is missing, which head repeats"):
        mapping.forward(metas({"head": numbered(3, 2)}))


ROW, WIDE = torch.zeros(4, 3), torch.zeros(4, 5)
REFUSED: list[tuple[list[Operator], Values, str]] = [
    ([Rename("{x}.a", "{x}.b")], {"l.a": ROW, "l.b": ROW}, "two tensors become l.b"),
    ([Concat(("q", "k"), "qk")], {"q": ROW}, "k is missing, which belongs with q"),
    ([Concat(("q", "k"), "qk")], {"q": ROW, "k": WIDE}, "k has shape [4, 5], not [4, 3]"),
    (
        [Concat(("q", "k"), "qk", sizes=(4, 2))],
        {"q": ROW, "k": ROW},
        "k has shape [4, 3], not [2, 3]",
    ),
    (
        [Concat(("q", "k"), "qk")],
        {"q": ROW, "k": ROW.bfloat16()},
        "k is torch.bfloat16, q is torch.float32: one tensor is made of them",
    ),
    (
        [Split("w", ("a", "b", "c"))],
        {"w": ROW},
        "w has shape [4, 3]: dimension 0 is not made of 3 equal parts",
    ),
    (
        [Split("w", ("a", "b"), sizes=(1, 2))],
        {"w": ROW},
        "w has shape [4, 3]: dimension 0 is not made of parts of [1, 2]",
    ),
    ([Split("w", ("a", "b"), dim=2)], {"w": ROW}, "w has shape [4, 3], and no dimension 2"),
    (
        [Stack("e.{expert}", "all")],
        {"e.0": ROW, "e.2": ROW},
        "all is stacked from 2 tensors such as e.2, but number 1 is missing",
    ),
    ([Stack("e.{expert}", "all")], {"e.x": ROW}, "e.x: 'x' is no number to stack over"),
    ([Stack("e.{expert}", "all")], {"e.0": ROW, "e.1": WIDE}, "e.1 has shape [4, 5], not [4, 3]"),
    ([Transpose("w", (1, 0, 2))], {"w": ROW}, "w has shape [4, 3], not 3 dimensions"),
    ([Reshape("w", (2, 6), (3, 4))], {"w": ROW}, "w has shape [4, 3], not [2, 6]"),
]


@pytest.mark.parametrize(("operators", "values", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    operators: list[Operator], values: Values, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorMapping(operators).forward(metas(values))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rename("a.{i}", "b"), "patterns 'a.{i}' and 'b' must have the same placeholders"),
        (lambda: Rename("{i}{j}", "{i}.{j}"), "'{i}{j}' must have at most one placeholder"),
        (lambda: Rename("a.{i", "b.{i"), "must have at most one placeholder such as {layer}"),
        (lambda: Rename("{i}.{i}", "{i}.x"), "has a placeholder twice"),
        (lambda: Rename("{i:a|b}.x", "{i:a|c}.y"), "{i} is one of a|b elsewhere"),
        (lambda: Stack("a.{i}", "b.{i}"), "pattern 'a.{i}' has no {expert} to stack over"),
        (lambda: Unstack("b.{i}", "a.{i}"), "pattern 'a.{i}' has no {expert} to stack over"),
        (lambda: Split("a", ("b", "c"), sizes=(1,)), "1 sizes for 2 parts"),
        (lambda: Concat(("b", "c"), "a", sizes=(1,)), "1 sizes for 2 parts"),
        (lambda: Transpose("a", (0, 2)), "(0, 2) is no permutation"),
        (lambda: Reshape("a", (2, 3), (5,)), "differ in elements"),
    ],
)
def test_operators_that_have_no_inverse_cannot_be_made(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()  # type: ignore[operator]


def test_a_function_must_return_what_was_declared() -> None:
    operator = Exact(("a",), ("b", "c"), lambda tensors: tensors, lambda tensors: tensors[:1])
    with pytest.raises(ValueError, match="the function for b, c returns 1 tensors"):
        TensorMapping([operator]).forward(metas({"a": ROW}))


def test_other_forms_are_read_and_not_written() -> None:
    """Old names and quantised weights come in; out go the usual names and plain values."""
    decode = Exact(("{layer}.codes", "{layer}.scale"), ("{layer}.w",), _decode, _no_way_back)
    mapping = TensorMapping(
        [
            Inward((Rename("old.{layer}.codes", "{layer}.codes"), decode)),
            Rename("{layer}.w", "layers.{layer}.weight"),
        ]
    )
    values = {
        "old.0.codes": torch.tensor([1, 2], dtype=torch.uint8),
        "0.scale": torch.tensor([4, 5], dtype=torch.uint8),
        "1.w": numbered(2),
    }
    ours = evaluate(mapping.forward(metas(values)), values)
    assert torch.equal(ours["layers.0.weight"], torch.tensor([4.0, 10.0]))
    assert torch.equal(ours["layers.1.weight"], values["1.w"])
    back = evaluate(mapping.inverse(metas(ours)), ours)
    assert torch.equal(back["0.w"], ours["layers.0.weight"])
    assert back.keys() == {"0.w", "1.w"}
    assert set(mapping.inward().forward(metas(values)).tensors) == {"0.w", "1.w"}
    with pytest.raises(ValueError, match="run inward alone must stand before all others"):
        TensorMapping([Rename("a", "b"), Inward((Rename("c", "d"),))])


def _decode(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    codes, scale = tensors
    return [codes.float() * scale.float()]


def _no_way_back(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    raise AssertionError("only read")
