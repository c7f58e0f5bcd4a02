import math
import re
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mcore_parallel.group import Group
from mcore_parallel.layout import Box, LayoutTensor, TensorLayout, check_tiling
from mcore_parallel.rng import RngKey
from mcore_parallel.spec import (
    GradSync,
    Init,
    ParamSpec,
    _blocks,
    fill_,
    initialise,
    param_specs,
)

NORMAL = Init(kind="normal", std=0.5)


def group(rank: int, size: int) -> Group:
    return Group(rank, size, tuple(range(size)), name="tp")


class Sharded(nn.Module):
    """Rows of a [8, 3] weight and all of a bias; in a fused way when `fused`."""

    def __init__(self, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(8 // tp.size, 3))

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        size = 8 // self.tp.size
        box = Box((size * self.tp.rank, 0), (size, 3))
        layout = TensorLayout.box(f"{prefix}.weight", (8, 3), box)
        return {"weight": ParamSpec(layout=layout, init=NORMAL)}


class Norm(nn.Module):
    param_init: ClassVar = {"scale": Init(kind="constant", value=2.0)}

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.shift_bias = nn.Parameter(torch.empty(3))


class Block(nn.Module):
    def __init__(self, tp: Group, *, whole_gradients: bool = False) -> None:
        super().__init__()
        self.norm = Norm()
        self.proj = Sharded(tp)
        if whole_gradients:
            self.grad_is_partial = False


class Model(nn.Module):
    def __init__(self, tp: Group) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.ModuleDict({"17": Block(tp), "18": Block(tp, whole_gradients=True)})
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def names_of(specs: dict[str, ParamSpec]) -> dict[str, tuple[str, ...]]:
    return {key: spec.layout.names() for key, spec in specs.items()}


def test_module_paths_are_global_names_and_tied_parameters_appear_once() -> None:
    model = Model(group(1, 2))
    specs = param_specs(model, tp=group(1, 2), sequence_parallel=False)
    assert names_of(specs) == {
        key: (key,) for key, _ in model.named_parameters(remove_duplicate=True)
    }
    assert "head.weight" not in specs
    prefixed = param_specs(model, tp=group(1, 2), sequence_parallel=False, prefix="vision")
    assert prefixed.keys() == specs.keys()
    assert names_of(prefixed) == {key: (f"vision.{key}",) for key in specs}


def test_tied_parameters_of_modules_that_answer_for_themselves_appear_once() -> None:
    first, second = Sharded(group(0, 2)), Sharded(group(0, 2))
    second.weight = first.weight
    model = nn.ModuleDict({"embedding": first, "head": second})
    specs = param_specs(model, tp=group(0, 2), sequence_parallel=False)
    assert names_of(specs) == {"embedding.weight": ("embedding.weight",)}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_together_hold_every_tensor(size: int) -> None:
    specs = [
        param_specs(Model(group(r, size)), tp=group(r, size), sequence_parallel=True)
        for r in range(size)
    ]
    check_tiling(spec.layout for by_key in specs for spec in by_key.values())
    whole = specs[-1]["layers.17.norm.scale"].layout.fragments[0]
    assert (whole.replica, whole.num_replicas) == (size - 1, size)


def test_whole_parameters_are_synchronised_under_sequence_parallelism_only() -> None:
    tp = group(0, 2)
    with_sp = param_specs(Model(tp), tp=tp, sequence_parallel=True)
    assert {key for key, spec in with_sp.items() if spec.grad_sync} == {
        "embedding.weight",
        "layers.17.norm.scale",
        "layers.17.norm.shift_bias",
    }
    assert with_sp["embedding.weight"].grad_sync == (GradSync(group=tp),)
    without = param_specs(Model(tp), tp=tp, sequence_parallel=False)
    alone = param_specs(Model(group(0, 1)), tp=group(0, 1), sequence_parallel=True)
    assert not any(spec.grad_sync for specs in (without, alone) for spec in specs.values())


def test_defaults_follow_names_and_dimensions() -> None:
    specs = param_specs(Model(group(0, 1)), tp=group(0, 1), sequence_parallel=False)
    assert specs["embedding.weight"].init == Init(kind="normal", std=0.02)
    assert specs["layers.17.norm.scale"].init == Init(kind="constant", value=2.0)
    assert specs["layers.17.norm.shift_bias"].init == Init(kind="zeros")
    assert specs["layers.17.proj.weight"].init == NORMAL
    scale = param_specs(nn.LayerNorm(3), tp=group(0, 1), sequence_parallel=False)["weight"]
    assert scale.init == Init(kind="ones")
    assert {key for key, spec in specs.items() if spec.decay} == {
        "embedding.weight",
        "layers.17.proj.weight",
        "layers.18.proj.weight",
    }
    shard = specs["embedding.weight"].layout.flat_range(0, 4)
    assert ParamSpec(layout=shard, init=NORMAL).decay, "a flat slice of a matrix still decays"
    assert not ParamSpec(layout=shard, init=NORMAL, decay=False).decay


class Outer(nn.Module):
    """Answers for a parameter of a module below it, and forgets one of its own."""

    def __init__(self, forget: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, bias=True)
        self.forget = forget
        if forget:
            self.own = nn.Parameter(torch.empty(2))

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        layout = TensorLayout.whole(f"{prefix}.renamed", (2, 3))
        return {"inner.weight": ParamSpec(layout=layout, init=NORMAL)}


def test_a_module_may_answer_for_modules_below_it_but_not_leave_out_its_own() -> None:
    model = nn.Sequential(Outer(forget=False))
    specs = param_specs(model, tp=group(0, 1), sequence_parallel=False)
    assert names_of(specs) == {
        "0.inner.weight": ("0.renamed",),
        "0.inner.bias": ("0.inner.bias",),
    }
    with pytest.raises(ValueError, match=r"0\.own: Outer\.param_specs leaves it out"):
        param_specs(nn.Sequential(Outer(forget=True)), tp=group(0, 1), sequence_parallel=False)


def test_a_layout_of_another_shape_than_the_parameter_is_refused() -> None:
    model = Sharded(group(0, 2))
    model.weight = nn.Parameter(torch.empty(5, 3))
    message = "proj.weight: parameter of shape [5, 3], layout of shape [4, 3]"
    with pytest.raises(ValueError, match=re.escape(message)):
        param_specs(nn.ModuleDict({"proj": model}), tp=group(0, 2), sequence_parallel=False)


def test_specs_refuse_values_that_make_no_sense() -> None:
    layout = TensorLayout.whole("w", (4, 3))
    with pytest.raises(ValueError, match="w: gradient range 6:13 leaves the 12 local elements"):
        ParamSpec(
            layout=layout, init=NORMAL, grad_sync=(GradSync(group=group(0, 2), start=6, stop=13),)
        )
    with pytest.raises(ValueError, match="unknown initialisation 'glorot'"):
        Init(kind="glorot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="deviation -1 must not be negative"):
        Init(kind="normal", std=-1)
    with pytest.raises(ValueError, match="bounds 2 … 1 are reversed"):
        Init(kind="uniform", low=2, high=1)
    with pytest.raises(ValueError, match=r"values from 0\.0 on have no logarithm: use low > 0"):
        Init(kind="log_uniform", high=2.0)
    with pytest.raises(ValueError, match="values from -1 on have no logarithm"):
        Init(kind="uniform", low=-1, through="exp")
    with pytest.raises(ValueError, match="through='exp' needs uniform values, not normal"):
        Init(kind="normal", through="exp")
    with pytest.raises(ValueError, match="unknown function 'log'"):
        Init(kind="uniform", low=1, high=2, through="log")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 4])
def test_initial_values_are_the_same_on_any_number_of_ranks(size: int) -> None:
    def built(rank: int, size: int) -> dict[str, LayoutTensor]:
        model = Model(group(rank, size))
        specs = param_specs(model, tp=group(rank, size), sequence_parallel=False)
        params = dict(model.named_parameters())
        initialise(params, specs, RngKey(5))
        return {key: LayoutTensor(param, specs[key].layout) for key, param in params.items()}

    whole = {key: x.tensor for key, x in built(0, 1).items()}
    for rank in range(size):
        for key, local in built(rank, size).items():
            for fragment, view in local.views():
                assert torch.equal(view, whole[key].detach()[fragment.box.slices])
    assert whole["layers.17.norm.scale"].tolist() == [2.0] * 3
    assert not torch.equal(whole["layers.17.proj.weight"], whole["layers.18.proj.weight"])
    with pytest.raises(ValueError, match="parameters and specs differ in 1 names, first 'x'"):
        initialise({"x": torch.empty(3)}, {}, RngKey(5))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_of_a_tensor_gets_the_same_values(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, 7)) for _ in range(data.draw(st.integers(1, 3))))
    kinds = [
        NORMAL,
        Init(kind="uniform", low=-3.0, high=-1.0),
        Init(kind="uniform", low=1.0, high=16.0, through="exp"),
        Init(kind="log_uniform", low=1e-3, high=0.1, through="softplus"),
    ]
    init = data.draw(st.sampled_from(kinds))
    layout = TensorLayout.whole("w", shape)
    whole = torch.empty(shape)
    fill_(whole, layout, init, RngKey(1))
    if data.draw(st.booleans()):
        layout, expected = layout.transposed(0, -1), whole.transpose(0, -1).contiguous()
    else:
        expected = whole
    a = data.draw(st.integers(0, layout.numel))
    b = data.draw(st.integers(a, layout.numel))
    padded = TensorLayout.concat([layout.flat_range(a, b), TensorLayout.padding((2,))])
    local = torch.full((b - a + 2,), 7.0)
    fill_(local, padded, init, RngKey(1))
    assert torch.equal(local, torch.cat([expected.flatten()[a:b], torch.zeros(2)]))


def test_initial_values_have_the_distribution_asked_for() -> None:
    layout = TensorLayout.whole("w", (300, 200))
    local = torch.empty(300, 200)
    fill_(local, layout, Init(kind="normal", std=0.02), RngKey(1))
    assert abs(float(local.mean())) < 5 * 0.02 / 245
    assert float(local.std()) == pytest.approx(0.02, rel=0.02)
    fill_(local, layout, Init(kind="uniform", low=-3.0, high=-1.0), RngKey(1))
    assert float(local.mean()) == pytest.approx(-2.0, abs=0.02)
    assert -3.0 <= float(local.min()) < -2.99
    assert -1.01 < float(local.max()) < -1.0
    for kind, value in {"zeros": 0.0, "ones": 1.0, "constant": 0.25}.items():
        fill_(local, layout, Init(kind=kind, value=0.25), RngKey(1))  # type: ignore[arg-type]
        assert float(local.min()) == float(local.max()) == value


@pytest.mark.parametrize("through", [None, "exp", "softplus"])
@pytest.mark.parametrize("kind", ["uniform", "log_uniform"])
def test_a_function_of_the_parameter_has_the_distribution_asked_for(
    kind: str, through: str | None
) -> None:
    """Quarters of the bounds, or of their logarithms, hold a quarter of the values each."""
    local = torch.empty(300, 200)
    init = Init(kind=kind, low=1e-3, high=0.1, through=through)  # type: ignore[arg-type]
    fill_(local, TensorLayout.whole("w", (300, 200)), init, RngKey(1))
    functions = {"exp": torch.exp, "softplus": torch.nn.functional.softplus}
    drawn = local.double() if through is None else functions[through](local.double())
    assert 1e-3 * (1 - 1e-5) <= float(drawn.min()) < 1.1e-3
    assert 0.099 < float(drawn.max()) <= 0.1 * (1 + 1e-5)
    share = (drawn - 1e-3) / 0.099 if kind == "uniform" else (drawn / 1e-3).log() / math.log(100)
    for quarter in range(4):
        inside = (share >= quarter / 4) & (share < (quarter + 1) / 4)
        assert float(inside.double().mean()) == pytest.approx(0.25, abs=0.01)


def test_low_precision_gets_the_rounded_values() -> None:
    layout = TensorLayout.whole("w", (30, 20))
    exact, rounded = torch.empty(30, 20), torch.empty(30, 20, dtype=torch.bfloat16)
    fill_(exact, layout, NORMAL, RngKey(1))
    fill_(rounded, layout, NORMAL, RngKey(1))
    assert torch.equal(rounded, exact.bfloat16())


@given(st.lists(st.integers(1, 9), max_size=3), st.integers(1, 30))
def test_large_tensors_are_filled_block_by_block(shape: list[int], limit: int) -> None:
    blocks = list(_blocks(Box.whole(shape), limit))
    assert all(block.numel <= limit for block in blocks)
    layout = [TensorLayout.box("w", shape, block) for block in blocks]
    check_tiling(layout)
