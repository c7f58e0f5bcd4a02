"""The conformance suite over everything registered, and over planted faults that it must find."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mcore_kernels import OPERATORS, Implementation, Target, resolve
from mcore_kernels.ops.add_rms_norm.reference import add_rms_norm
from mcore_kernels.ops.attention.reference import ReferenceAttention
from mcore_kernels.ops.causal_conv1d.reference import causal_conv1d
from mcore_kernels.ops.cross_entropy.reference import ReferenceVocabLoss
from mcore_kernels.ops.gated_delta_rule.chunked import gated_delta_rule
from mcore_kernels.ops.glu.reference import glu
from mcore_kernels.ops.grouped_linear.reference import ReferenceGroupedLinear
from mcore_kernels.ops.linear.reference import ReferenceLinear
from mcore_kernels.ops.moe_permute.reference import ReferencePermute
from mcore_kernels.ops.moe_route.reference import moe_route
from mcore_kernels.ops.paged_attention.reference import paged_attention
from mcore_kernels.ops.rope.reference import ReferenceRope
from mcore_kernels.ops.ssd_scan.chunked import ssd_scan
from mcore_kernels.testing import assert_matches_reference, cases, runnable
from mcore_kernels.testing.case import scattered
from mcore_kernels.testing.compare import assert_close

CUDA = Target(device_type="cuda", arch=(9, 0))


@pytest.mark.parametrize(("op", "implementation"), runnable(Target()))
def test_on_cpu(op: str, implementation: str) -> None:
    # One takes small products one after another, one is traced anew for every call; what a dtype
    # changes in them is seen in few cases.
    slow = {("attention", "invariant"): 4, ("attention", "flex"): 12}
    every = slow.get((op, implementation), 1)
    done = assert_matches_reference(op, implementation, every=every)
    assert len(done) >= 36
    assert {line.partition(":")[0] for line in done} >= {"float32", "bfloat16", "float16"}


# torch warns where a backward is the first to multiply matrices on a device; nothing is wrong then.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("op", "implementation"),
    # Every kind of call to it is compiled for seconds: tests/kernels/ops/test_flex.py has a few.
    [one for one in runnable(CUDA) if one != ("attention", "flex")],
)
def test_on_cuda(op: str, implementation: str) -> None:
    done = assert_matches_reference(op, implementation, target=Target.of("cuda"))
    assert len(done) >= 8 * len({line.partition(":")[0] for line in done}) >= 8


def test_what_is_covered() -> None:
    """Every operator meets odd sizes, nothing, tensors in pieces, NaN and large values."""
    for op in OPERATORS:
        if op in ("rope", "attention", "paged_attention", "ssd_scan", "gated_delta_rule"):
            continue  # large values are not what they are sensitive to: their cases say what is
        names = " | ".join(case.name for case in cases(op))
        for kind in ("NaN", "scattered", "large|sharp", "no tokens|no rows|no document"):
            assert any(word in names for word in kind.split("|")), (op, kind)


def test_another_seed_is_other_numbers() -> None:
    first, again, other = (cases("gelu", seed=seed)[0].arguments["x"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert assert_matches_reference("gelu", "reference", seed=7)


def test_one_that_can_run_nowhere_here_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="rms_norm: 'triton' cannot run on cpu float32: needs a CU"
    ):
        assert_matches_reference("rms_norm", "triton")


# ------------------------------------------------------------------- planted faults


def _eps_outside(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + eps) * weight).to(x)


def _rounds_before_weight(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = F.rms_norm(wide, x.shape[-1:], eps=eps).to(x.dtype)
    return normed if weight is None else normed * (weight + zero_centered).to(x.dtype)


def _float32_inside(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _reads_memory_as_it_lies(gate_up: torch.Tensor) -> torch.Tensor:
    lying = gate_up.as_strided(
        gate_up.shape, torch.empty(gate_up.shape).stride(), gate_up.storage_offset()
    )
    gate, up = lying.chunk(2, -1)
    return F.silu(gate) * up


def _hides_nan(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.nan_to_num().chunk(2, -1)
    return F.silu(gate) * up


def _no_gradient_of_up(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up.detach()


class _Rounds(ReferenceLinear):
    def weight_grad(
        self, dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        product = dy.t() @ x
        return product if out is None else out.add_(product)


class _LocalDelta(ReferenceAttention):
    def backward_block(self, grad_out, q, k, v, *, out, lse, visibility):  # type: ignore[no-untyped-def]
        out, lse = self.forward_block(q, k, v, visibility)
        return super().backward_block(grad_out, q, k, v, out=out, lse=lse, visibility=visibility)


class _TopLeft(ReferenceAttention):
    def __call__(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, **rest):  # type: ignore[no-untyped-def]
        lq, lk = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        if rest.get("causal", True) and bool((lq < lk).any()):
            rest["causal"] = False
        return super().__call__(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **rest
        )


class _ForgetsSmoothing(ReferenceVocabLoss):
    def backward(self, *arguments, on_target, on_all, out):  # type: ignore[no-untyped-def]
        super().backward(*arguments, on_target=on_target, on_all=0.0, out=out)


def _one_document(x, weight, bias=None, *, cu_seqlens, uniform=None, **rest):  # type: ignore[no-untyped-def]
    """Sees the end of the document before."""
    y, states = causal_conv1d(x, weight, bias, cu_seqlens=cu_seqlens, uniform=uniform, **rest)
    if uniform is None and x.shape[0] and rest.get("initial_states") is None:
        y, _ = causal_conv1d(x, weight, bias, cu_seqlens=cu_seqlens[[0, -1]], uniform=None, **rest)
    return y, states


def _no_state_gradient(*arguments, initial_states=None, **rest):  # type: ignore[no-untyped-def]
    fixed = None if initial_states is None else initial_states.detach()
    return ssd_scan(*arguments, initial_states=fixed, **rest)


def _limits_before_softplus(*arguments, dt_limits=(0.0, float("inf")), **rest):  # type: ignore[no-untyped-def]
    if dt_limits[0] > 0:
        rest["dt"] = rest["dt"].clamp(*dt_limits)
    return ssd_scan(*arguments, **rest)


def _heads_in_turn(q, k, v, *arguments, **rest):  # type: ignore[no-untyped-def]
    """Head i reads key head i % K."""
    q, k = (x.repeat(1, v.shape[1] // x.shape[1], 1) for x in (q, k))
    return gated_delta_rule(q, k, v, *arguments, **rest)


def _half_gradient_of_decay(q, k, v, g, beta, **rest):  # type: ignore[no-untyped-def]
    return gated_delta_rule(q, k, v, g.detach() + 0.5 * (g - g.detach()), beta, **rest)


def _no_gradient_of_limit(gate_up, bias=None, *, limit=None, **rest):  # type: ignore[no-untyped-def]
    """Lets the gradient through where the clamp took hold."""
    if limit is not None:
        x = gate_up if bias is None else gate_up + bias
        gate, up = x.chunk(2, -1)
        clamped = torch.cat((gate.clamp(max=limit), up.clamp(-limit, limit)), -1)
        return glu(x + (clamped - x).detach(), **rest)
    return glu(gate_up, bias, **rest)


def _norm_of_unrounded(x, residual, weight, eps, *, zero_centered=False):  # type: ignore[no-untyped-def]
    """Passes on x in place of the sum."""
    y, _ = add_rms_norm(x, residual, weight, eps, zero_centered=zero_centered)
    return y, x.to(torch.promote_types(x.dtype, residual.dtype))


def _last_of_equals(logits, correction=None, *, rule):  # type: ignore[no-untyped-def]
    weights, experts, scores = moe_route(
        logits.flip(-1), None if correction is None else correction.flip(-1), rule=rule
    )
    return weights, logits.shape[-1] - 1 - experts, scores.flip(-1)


class _KeepsDropped(ReferencePermute):
    def unpermute(self, rows, weights, assignment):  # type: ignore[no-untyped-def]
        places = assignment.places.clamp_min(0)
        if not rows.shape[0]:
            return super().unpermute(rows, weights, assignment)
        return super().unpermute(rows, weights, replace(assignment, places=places))


class _RoundsExperts(ReferenceGroupedLinear):
    def weight_grad(self, dy, x, counts, out):  # type: ignore[no-untyped-def]
        share = torch.zeros_like(out, dtype=x.dtype)
        super().weight_grad(dy, x, counts, share)
        out.add_(share)


class _OldTable(ReferenceRope):
    def inplace(self, q, k, cos, sin, interleaved=False):  # type: ignore[no-untyped-def]
        super().inplace(q, k, cos, sin)


def _neighbours_keys(q, key_cache, value_cache, *, context_lengths, **rest):  # type: ignore[no-untyped-def]
    """Reads a row past the end of each context, but for the sequence's own page."""
    longer = context_lengths + (context_lengths % key_cache.shape[1] > 0).to(torch.int32)
    return paged_attention(q, key_cache, value_cache, context_lengths=longer, **rest)


class _ForgetsSinks(ReferenceAttention):
    def __call__(self, q, k, v, *, sinks=None, **rest):  # type: ignore[no-untyped-def]
        return super().__call__(q, k, v, sinks=None if sinks is None else sinks.detach(), **rest)


class _NoSurprise(ReferenceVocabLoss):
    def gradient(self, *arguments, on_surprise, **rest):  # type: ignore[no-untyped-def]
        super().gradient(*arguments, on_surprise=None, **rest)


def _fault(op: str, fn: object) -> Implementation:
    return Implementation(op=op, name="fault", fn=fn)


EPS_OUTSIDE = _fault("rms_norm", _eps_outside)
ROUNDS_EARLY = _fault("rms_norm", _rounds_before_weight)
FLOAT32_INSIDE = _fault("swiglu", _float32_inside)
AS_IT_LIES = _fault("swiglu", _reads_memory_as_it_lies)
HIDES_NAN = _fault("swiglu", _hides_nan)
NO_GRADIENT = _fault("swiglu", _no_gradient_of_up)
ROUNDS_GRADIENT = _fault("linear", _Rounds())
LOCAL_DELTA = _fault("attention", _LocalDelta())
TOP_LEFT = _fault("attention", _TopLeft())
ONE_DOCUMENT = _fault("causal_conv1d", _one_document)
NO_STATE_GRADIENT = _fault("ssd_scan", _no_state_gradient)
EARLY_LIMITS = _fault("ssd_scan", _limits_before_softplus)
HEADS_IN_TURN = _fault("gated_delta_rule", _heads_in_turn)
HALF_DECAY = _fault("gated_delta_rule", _half_gradient_of_decay)
NO_LIMIT = _fault("glu", _no_gradient_of_limit)
WRONG_SUM = _fault("add_rms_norm", _norm_of_unrounded)
LAST_OF_EQUALS = _fault("moe_route", _last_of_equals)
KEEPS_DROPPED = _fault("moe_permute", _KeepsDropped())
ROUNDS_EXPERTS = _fault("grouped_linear", _RoundsExperts())
OTHER_PAIRS = _fault("rope", _OldTable())
LONGER_CONTEXTS = _fault("paged_attention", _neighbours_keys)
FIXED_SINKS = _fault("attention", _ForgetsSinks())
NO_SURPRISE = _fault("cross_entropy", _NoSurprise())
NO_SMOOTHING = _fault("cross_entropy", _ForgetsSmoothing())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("EPS_OUTSIDE", "in float64"),
        ("ROUNDS_EARLY", "in bfloat16"),
        ("FLOAT32_INSIDE", "in float64"),
        ("AS_IT_LIES", "scattered"),
        ("HIDES_NAN", "NaN: result 0: 0 NaNs, expected 1"),
        ("NO_GRADIENT", "gradient of gate_up"),
        ("ROUNDS_GRADIENT", "in float32: plain: weight_grad into torch.float64"),
        ("LOCAL_DELTA", "uniform: backward: dq"),
        ("TOP_LEFT", "prefill behind a cache"),
        ("NO_SMOOTHING", "smoothing: gradient"),
        ("ONE_DOCUMENT", "in float64: ragged: result 0"),
        ("NO_STATE_GRADIENT", "uniform: gradient of initial_states"),
        ("EARLY_LIMITS", "limits: result 0"),
        ("HEADS_IN_TURN", "uniform: result 0"),
        ("HALF_DECAY", "uniform: gradient of g"),
        ("NO_LIMIT", "as gpt-oss: gradient of gate_up"),
        ("WRONG_SUM", "plain: result 1"),
        ("LAST_OF_EQUALS", "equal logits: other experts"),
        ("KEEPS_DROPPED", "dropped copies: unweighted sum"),
        ("ROUNDS_EXPERTS", "in float32: plain: weight_grad into torch.float64"),
        ("OTHER_PAIRS", "plain, interleaved: in place: q differs"),
        ("LONGER_CONTEXTS", "decoding: result 0"),
        ("FIXED_SINKS", "sinks: gradient of sinks"),
        ("NO_SURPRISE", "one shard: gradient of all terms"),
    ],
)
def test_a_planted_fault_is_found(fault: str, message: str) -> None:
    op = globals()[fault].op
    with pytest.raises(AssertionError) as error:
        assert_matches_reference(op, f"{__name__}:{fault}")
    assert message in str(error.value)


def test_a_good_implementation_of_ones_own_passes() -> None:
    assert assert_matches_reference("swiglu", f"{__name__}:GOOD")


GOOD = _fault("swiglu", resolve("swiglu", target=Target(), require="reference"))


def test_comparison_sees_shape_dtype_and_infinity() -> None:
    one = torch.ones(2)
    with pytest.raises(AssertionError, match=r"thing: dtype torch.float32, expected torch.float64"):
        assert_close(one, one.double(), dtype=torch.float64, label="thing")
    with pytest.raises(AssertionError, match=r"expected torch.Size\(\[3\]\)"):
        assert_close(one, torch.ones(3).double(), dtype=torch.float32)
    with pytest.raises(AssertionError, match="infinities differ at 1"):
        assert_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.inf]), dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"element 1 of \(2,\) is 1.00001\d+, expected 1,"):
        assert_close(torch.tensor([1.0, 1.00001]), one.double(), dtype=torch.float32)
    assert_close(torch.tensor([1.0, 1.0000002]), one.double(), dtype=torch.float32)


def test_tensors_in_pieces_are_what_they_say() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(scattered(x), x)
    assert scattered(x).stride() == (9, 2)
    assert not replace(cases("gelu")[0], name="x").expanded
