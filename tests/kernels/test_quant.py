"""Formats of few bits against ml_dtypes, recipes, rules by name, and linear layers in them."""

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import mcore_parallel.protocols as theirs
from mcore_kernels import Target
from mcore_kernels.ops.grouped_linear.fp8 import Fp8GroupedLinear
from mcore_kernels.ops.linear.fp8 import ROLES, Fp8Linear
from mcore_kernels.ops.linear.microscaling import MicroscalingLinear
from mcore_kernels.quant import (
    E4M3,
    E5M2,
    DelayedScale,
    Fp8Recipe,
    MicroscalingRecipe,
    PrecisionRules,
    dequantize,
    mxfp8_dequantize,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    scale_of,
)
from mcore_kernels.quant.formats import decode_e2m1, encode_e2m1

HOPPER = Target(device_type="cuda", arch=(9, 0), dtype=torch.bfloat16)
RECIPES = [
    Fp8Recipe(),
    Fp8Recipe(history=3, margin=1),
    Fp8Recipe(scaling="row", grad_format="e4m3"),
    Fp8Recipe(scaling="block", grad_format="e4m3", power_of_two=True),
]


def numbers(size: int = 20_000) -> Tensor:
    """Of all sizes that a format has, halfway points between its numbers, and the edges."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, generator=generator)
    x *= torch.exp2(torch.randint(-22, 18, (size,), generator=generator).float())
    halves = torch.arange(256).float() / 16
    return torch.cat([x, halves, -halves, torch.tensor([0.0, -0.0, 448.0, 464.0, 57344.0])])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_eight_bits_are_those_of_ml_dtypes(fmt: Any) -> None:
    oracle = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt.name]
    x = numbers()
    wanted = x.clamp(-fmt.maximum, fmt.maximum).numpy().astype(oracle)
    assert np.array_equal(fmt.encode(x).view(torch.uint8).numpy(), wanted.view(np.uint8))
    assert fmt.encode(torch.tensor([torch.nan])).isnan().all()
    assert float(ml_dtypes.finfo(oracle).max) == fmt.maximum == 2**fmt.exponent * 1.75


def test_four_bits_are_those_of_ml_dtypes() -> None:
    x = numbers()
    wanted = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(encode_e2m1(x).numpy(), wanted.view(np.uint8))
    assert np.array_equal(decode_e2m1(encode_e2m1(x)).numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_mxfp8_is_that_of_ml_dtypes(fmt: Any, saturate: bool) -> None:
    x = numbers()[:19_200].view(-1, 64)
    x[0, :32], x[1, 40], x[2, 3] = 0.0, torch.nan, fmt.maximum
    q = mxfp8_quantize(x, fmt, saturate=saturate)
    blocks = x.numpy().astype(np.float64).reshape(-1, 2, 32)
    amax = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore"):
        if saturate:
            power = np.floor(np.log2(amax)) - fmt.exponent
        else:
            power = np.ceil(np.log2(amax / fmt.maximum))
    scale = np.exp2(power.clip(-127, 127)).astype(ml_dtypes.float8_e8m0fnu)
    assert np.array_equal(q.scale.view(torch.uint8).numpy(), scale.view(np.uint8))
    oracle = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt.name]
    exact = (blocks / scale.astype(np.float64)[..., None]).clip(-fmt.maximum, fmt.maximum)
    data = exact.astype(np.float32).astype(oracle).reshape(x.shape)
    whole = ~np.isnan(np.repeat(amax, 32, -1))
    assert np.array_equal(q.data.view(torch.uint8).numpy()[whole], data.view(np.uint8)[whole])
    back = mxfp8_dequantize(q)
    assert torch.equal(back.isnan(), torch.from_numpy(~whole))
    with np.errstate(invalid="ignore"):
        product = data.astype(np.float32).reshape(blocks.shape)
        product = (product * scale.astype(np.float32)[..., None]).reshape(x.shape)
    assert np.array_equal(back.numpy()[whole], product[whole])


def test_nvfp4_is_that_of_ml_dtypes() -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    x[::3] *= 1e-4
    x[1, :16] = 0.0
    q = nvfp4_quantize(x)
    blocks = x.numpy().reshape(40, 4, 16)
    amax = np.abs(blocks).max(-1)
    whole = np.float32(amax.max() / np.float32(6 * 448))
    scale = (amax / np.float32(6) / whole).clip(0, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.float32(q.tensor_scale) == whole
    assert np.array_equal(q.scale.view(torch.uint8).numpy(), scale.view(np.uint8))
    step = scale.astype(np.float32)[..., None] * whole
    exact = np.divide(blocks, step, where=step > 0, out=np.zeros_like(blocks)).clip(-6, 6)
    codes = exact.astype(ml_dtypes.float4_e2m1fn)
    bits = codes.view(np.uint8).reshape(40, 64)
    assert np.array_equal(q.data.numpy(), bits[:, ::2] | bits[:, 1::2] << 4)
    wanted = (codes.astype(np.float32) * step).reshape(40, 64)
    assert np.array_equal(nvfp4_dequantize(q).numpy(), wanted)
    x[3, 5] = torch.nan
    broken = nvfp4_dequantize(nvfp4_quantize(x)).isnan()
    assert broken[3, :16].all()
    assert int(broken.sum()) == 16


def test_scales() -> None:
    amax = torch.tensor([0.0, 448.0, 449.0, 1e-40, torch.inf])
    assert scale_of(amax, E4M3).tolist() == pytest.approx([1, 1, 449 / 448, 2**-100, torch.inf])
    powers = scale_of(amax, E4M3, power_of_two=True, margin=1)
    assert powers.tolist() == [1, 2, 4, 2**-100, torch.inf]
    assert scale_of(torch.tensor(torch.nan), E4M3, power_of_two=True).isnan()


def test_a_delayed_scale_is_of_the_steps_before() -> None:
    one = DelayedScale.fresh(2)
    seen = []
    for amax in (448.0, 896.0, 112.0, 112.0, torch.inf, 112.0):
        one.record(torch.tensor(amax / 2))
        one.record(torch.tensor(amax))
        seen.append((float(one.scale(E4M3)), float(one.scale(E4M3, latest=True))))
        one.advance()
    # An overflow counts by the finite rest of its step, which here is nothing.
    assert seen == [(1, 1), (1, 1), (2, 2), (2, 0.25), (0.25, 0.25), (0.25, 0.25)]


# -------------------------------------------------------------------------------- linear


def test_the_signatures_are_those_of_a_linear_operator() -> None:
    for method in ("__call__", "forward", "input_grad", "weight_grad"):
        wanted = inspect.signature(getattr(theirs.LinearOp, method))
        for kind in (Fp8Linear, MicroscalingLinear):
            assert inspect.signature(getattr(kind, method)) == wanted


def _layers() -> list[Any]:
    fp8 = [Fp8Linear(recipe) for recipe in RECIPES]
    return [*fp8, *(MicroscalingLinear(MicroscalingRecipe(format=f)) for f in ("mxfp8", "nvfp4"))]


@pytest.mark.parametrize("layer", _layers(), ids=lambda layer: str(layer.recipe))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_call_and_the_methods_agree_and_are_near(layer: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, dy = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((48, 150), (40, 150), (48, 40))
    )
    for _ in range(2):  # the second step has a history
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = layer(a, w)
        y.backward(dy)
        for found, method, exact in (
            (y.detach(), layer.forward(x, weight), x.double() @ weight.double().t()),
            (a.grad, layer.input_grad(dy, weight), dy.double() @ weight.double()),
            (w.grad, layer.weight_grad(dy, x), dy.double().t() @ x.double()),
        ):
            assert found.dtype == dtype
            assert torch.equal(found, method)
            error = float((found.double() - exact).norm() / exact.norm())
            assert 1e-3 < error < (0.2 if "nvfp4" in str(layer.recipe) else 0.07)
        buffer = torch.full((40, 150), 0.5)
        assert layer.weight_grad(dy, x, out=buffer) is buffer
        torch.testing.assert_close(buffer - 0.5, w.grad.float(), rtol=0.01, atol=0.02)
        if isinstance(layer, Fp8Linear):
            layer.advance()
    bias = torch.ones(40, dtype=dtype)
    torch.testing.assert_close(layer(x, weight, bias), layer(x, weight) + 1)


def test_micro_batches_are_summed_in_float32() -> None:
    """Shares too small for bfloat16 next to what the buffer holds are not lost."""
    layer = Fp8Linear(Fp8Recipe(grad_format="e4m3"))
    dy, x = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(1, 3, dtype=torch.bfloat16)
    buffer = torch.full((2, 3), 1024.0)
    for _ in range(8):
        layer.weight_grad(dy * 0.25, x, out=buffer)
    assert torch.equal(buffer, torch.full((2, 3), 1026.0))


def test_scales_are_shared_through_the_hook() -> None:
    """Two halves of the tokens, each quantised with the maximum of both, are those of the whole."""
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    x[5] *= 10
    maxima = {}

    def shared(amax: Tensor) -> Tensor:
        maxima.setdefault("calls", []).append(float(amax))
        assert amax.shape == (1,)
        return torch.maximum(amax, whole_amax)

    whole = Fp8Linear(Fp8Recipe())
    part = Fp8Linear(Fp8Recipe())
    whole_amax = torch.zeros(1)
    part.amax_reduce = shared
    whole_amax = x.abs().max().view(1)
    (data, scale), _ = whole.encode("input", x)
    for rows in (slice(0, 4), slice(4, 8)):
        (piece, piece_scale), _ = part.encode("input", x[rows])
        assert torch.equal(piece.view(torch.uint8), data[rows].view(torch.uint8))
        assert torch.equal(piece_scale, scale)
    assert len(maxima["calls"]) == 2
    rowwise = Fp8Linear(Fp8Recipe(scaling="row"))
    rowwise.amax_reduce = shared
    rowwise.forward(x, weight)
    assert len(maxima["calls"]) == 2
    torch.testing.assert_close(dequantize(data, scale, (0, 0)), x, rtol=0.07, atol=0.1)


def test_a_history_is_per_role_and_only_where_asked() -> None:
    layer = Fp8Linear(Fp8Recipe(history=2))
    assert tuple(layer.delayed) == ROLES
    assert not Fp8Linear(Fp8Recipe()).delayed
    x, weight = torch.full((4, 16), 2.0), torch.full((4, 16), 3.0)
    layer.weight_grad(layer.forward(x, weight), x)
    layer.advance()
    assert [float(layer.delayed[role].history[1]) for role in ROLES] == [2.0, 3.0, 96.0]


def test_the_first_step_of_a_history_takes_scales_from_the_tensor_at_hand() -> None:
    """With scales of 1 gradients of a real model would all be too small for the format."""
    x, weight = torch.randn(8, 32) * 1e-5, torch.randn(16, 32)
    late, now = Fp8Linear(Fp8Recipe(history=2)), Fp8Linear(Fp8Recipe())
    assert torch.equal(late.forward(x, weight), now.forward(x, weight))
    late.advance()
    assert torch.equal(late.forward(x, weight), now.forward(x, weight))  # the same values as before
    assert not torch.equal(late.forward(3 * x, weight), now.forward(3 * x, weight))
    fresh = Fp8Linear(Fp8Recipe(history=2))
    assert fresh.history is not None
    assert late.history is not None
    fresh.history.copy_(late.history)
    fresh.history_loaded()
    assert torch.equal(fresh.forward(3 * x, weight), late.forward(3 * x, weight))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("role", ["input", "grad"])
def test_an_overflow_stays_in_sight(recipe: Fp8Recipe, role: str) -> None:
    """Also where the scale is of the steps before: the loss is scaled down by what is seen."""
    layer, dy = Fp8Linear(recipe), torch.ones(8, 4)
    x, weight = torch.ones(8, 16, requires_grad=True), torch.ones(4, 16, requires_grad=True)
    layer(x, weight).backward(dy)
    layer.advance()
    over = (x.detach() if role == "input" else dy).clone()
    over[2, 3] = torch.inf
    y = layer(over if role == "input" else x, weight)
    gradients = torch.autograd.grad(y, [weight], over if role == "grad" else dy)
    assert bool(y.isfinite().all()) == (role == "grad")
    assert not gradients[0].isfinite().all()
    layer.advance()
    assert layer(x, weight).isfinite().all()  # the history is without it


def test_a_role_that_never_ran_takes_what_all_ranks_have() -> None:
    """In a later step, too: others have a history by then, and this one must be asked for."""
    layer, asked = Fp8Linear(Fp8Recipe(history=2)), []

    def reduce(amax: Tensor) -> Tensor:
        asked.append(float(amax))
        return amax * 4.0

    layer.amax_reduce = reduce
    x, weight = torch.full((2, 4), 3.0), torch.full((3, 4), 2.0)
    layer.forward(x, weight)  # no gradient of an output
    layer.advance()
    assert layer.seen == {"input", "weight"}
    asked.clear()
    layer.forward(x, weight)
    along, _ = layer.encode("grad", torch.full((2, 3), 5.0))
    assert asked == [5.0]
    assert along is not None
    assert float(along[1]) == pytest.approx(20.0 / 57344.0)
    layer.advance()
    layer.advance()  # a step without numbers takes nothing away
    assert layer.seen == frozenset(ROLES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.scaling)
def test_experts_are_layers_by_themselves(recipe: Fp8Recipe) -> None:
    """Bit for bit, over steps; the methods agree with the call, and a buffer is added to."""
    counts, steps = (3, 0, 5), 2
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = drawn(3, 6, 10)
    experts = Fp8GroupedLinear(recipe, 3, keeps_weight=True)
    layers = [Fp8Linear(recipe) for _ in counts]
    for _ in range(steps):
        x, dy = drawn(8, 10) * 3.0, drawn(8, 6)
        given = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = experts(*given, counts)
        dx, dw = torch.autograd.grad(y, given, dy)
        assert not dw[1].any()
        for i, rows in ((0, slice(0, 3)), (2, slice(3, 8))):
            own = x[rows].clone().requires_grad_(), weight[i].clone().requires_grad_()
            one = layers[i](*own)
            assert torch.equal(y[rows], one)
            found = torch.autograd.grad(one, own, dy[rows])
            assert torch.equal(dx[rows], found[0])
            torch.testing.assert_close(dw[i], found[1], rtol=1e-12, atol=1e-12)
        if not recipe.history:
            assert torch.equal(experts.forward(x, weight, counts), y)
            assert torch.equal(experts.input_grad(dy, weight, counts), dx)
            buffer = torch.ones_like(weight)
            experts.weight_grad(dy, x, torch.tensor(counts), buffer)
            torch.testing.assert_close(buffer, dw + 1.0)
        for op in (experts, *layers):
            op.advance()
    if recipe.history:
        assert experts.history is not None
        assert not experts.history[::2, 1].any()  # of the expert without rows; its weight is there
        assert experts.history[1, 1].any()


def test_what_records_no_graph_leaves_no_trace_in_a_history() -> None:
    layer = Fp8Linear(Fp8Recipe(history=2))
    x, weight = torch.ones(4, 16), torch.ones(4, 16, requires_grad=True)
    with torch.no_grad():
        layer(x * 7, weight)
    layer(x, weight).sum().backward()
    assert [float(layer.delayed[role].history[0]) for role in ROLES] == [1.0, 1.0, 1.0]


def test_numbers_of_a_weight_are_kept_until_it_changes() -> None:
    layer, counted = Fp8Linear(Fp8Recipe(), keeps_weight=True), []
    quantize = layer._quantize

    class Counting:
        def both(self, x: Tensor, *args: Any, **options: Any) -> Any:
            counted.append(x.shape)
            return quantize.both(x, *args, **options)

        def __call__(self, x: Tensor, *args: Any, **options: Any) -> Any:
            return quantize(x, *args, **options)

    layer._quantize = Counting()
    flat = torch.randn(4 * 16)
    weight = torch.nn.Parameter(flat.view(4, 16))
    x = torch.randn(3, 16)
    for _ in range(2):  # two micro-batches
        layer(x, weight).sum().backward()
    assert counted.count(weight.shape) == 1
    with torch.no_grad():
        weight.mul_(2.0)  # torch counts such changes
    assert torch.equal(layer(x, weight), Fp8Linear(Fp8Recipe())(x, weight))
    weight.data.mul_(2.0)  # and not these, as when a view of a bucket is written
    stale = layer(x, weight)
    layer.forget_weight()
    assert torch.equal(layer(x, weight), 2 * stale)
    other = torch.nn.Parameter(torch.randn(4, 16))
    assert torch.equal(layer(x, other), Fp8Linear(Fp8Recipe())(x, other))


# --------------------------------------------------------------------- recipes and rules


def test_recipes_that_cannot_be() -> None:
    for options, message in (
        ({"scaling": "rows"}, "recipe: no scaling 'rows'; did you mean 'row'?"),
        ({"grad_format": "e4m"}, "recipe: no grad_format 'e4m'; did you mean 'e4m3'?"),
        ({"forward_format": "e5m2"}, "fp8 recipe: e5m2 forward and backward cannot be; use e4m3"),
        ({"history": -1}, "fp8 recipe: history must be at least 0, got -1"),
        ({"history": 4, "scaling": "row"}, "fp8 recipe: history=4 needs scaling='tensor'"),
        ({"latest": True}, "fp8 recipe: latest=True needs a history of at least 1 step"),
    ):
        with pytest.raises(ValueError) as error:
            Fp8Recipe(**options)  # type: ignore[arg-type]
        assert str(error.value).startswith(message)
    with pytest.raises(ValueError, match="no format 'mxfp4'; did you mean 'mxfp8'"):
        MicroscalingRecipe(format="mxfp4")
    with pytest.raises(ValueError, match=r"mxfp8: blocks of 32 must fill .* the next width is 64"):
        mxfp8_quantize(torch.ones(2, 40))


def test_what_a_machine_cannot_multiply_is_refused_with_the_reason() -> None:
    ampere = Target(device_type="cuda", arch=(8, 0), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"8\.9 or newer, the target's is 8\.0; emulate=True"):
        Fp8Linear(Fp8Recipe(), ampere)
    for name in ("mxfp8", "nvfp4"):
        recipe = MicroscalingRecipe(format=name)
        with pytest.raises(ValueError, match=r"needs compute capability 10\.0 or newer"):
            MicroscalingLinear(recipe, HOPPER)
        assert MicroscalingLinear(recipe, HOPPER, emulate=True).recipe is recipe
        blackwell = Target(device_type="cuda", arch=(10, 0), dtype=torch.bfloat16)
        assert "is emulated only" in str(recipe.refusal(blackwell))
        assert recipe.refusal(Target()) is None
    assert all(recipe.refusal(HOPPER) is None for recipe in RECIPES)
    assert Fp8Linear(Fp8Recipe(), ampere, emulate=True, device="cpu").recipe == Fp8Recipe()


def test_rules_by_name() -> None:
    fp8, mx = Fp8Recipe(), MicroscalingRecipe()
    rules = PrecisionRules(
        recipes={"fp8": fp8, "mx": mx},
        rules=(("*.router", None), ("layers.*.mlp.*", "mx")),
        default="fp8",
    )
    assert rules.of("layers.0.mlp.up") is mx
    assert rules.of("layers.0.mlp.router") is None
    assert rules.of("layers.0.attention.q") is fp8
    rules.check(["layers.0.mlp.up", "layers.0.router"])
    with pytest.raises(
        ValueError, match=r"no module is called '\*\.router'; did you mean 'a.route"
    ):
        rules.check(["a.routes", "layers.0.mlp.up"])
    with pytest.raises(ValueError, match=r"x\.\*: no recipe 'fp9'; did you mean 'fp8'"):
        PrecisionRules(recipes={"fp8": fp8}, rules=(("x.*", "fp9"),))


def test_the_first_and_last_layers_keep_their_dtype() -> None:
    rules = PrecisionRules.with_ends(Fp8Recipe(), num_layers=12, first=1, last=2)
    kept = [i for i in range(12) if rules.of(f"layers.{i}.mlp.up") is None]
    assert kept == [0, 10, 11]
    assert rules.of("lm_head") is None
    with pytest.raises(ValueError, match="3 first and 2 last layers of 4 in all"):
        PrecisionRules.with_ends(Fp8Recipe(), num_layers=4, first=3, last=2)
