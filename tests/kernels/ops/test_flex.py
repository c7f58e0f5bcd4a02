"""FlexAttention: which blocks of keys are visited, masks kept, one graph, and on a GPU the rest."""

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_kernels import Target, explain, resolve
from mcore_kernels.ops.attention import flex
from mcore_kernels.ops.attention.base import Segments, Visibility
from mcore_kernels.ops.attention.flash import MIN_CAPPED, FlashAttention
from mcore_kernels.ops.attention.intervals import BLOCK, KEPT, block_mask
from mcore_kernels.ops.attention.packed import PackedPlan
from mcore_kernels.ops.attention.reference import REFERENCE
from mcore_kernels.testing.compare import assert_close

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def segments(
    queries: list[int],
    keys: list[int] | None = None,
    *,
    uniform: tuple[int, int] | None = None,
    device: str = "cpu",
) -> Segments:
    keys = queries if keys is None else keys
    return Segments(
        cu_seqlens_q=ends(queries).to(device),
        cu_seqlens_k=ends(keys).to(device),
        max_seqlen_q=max(queries, default=0),
        max_seqlen_k=max(keys, default=0),
        uniform=uniform,
    )


def seen(visibility: Visibility, queries: list[int], keys: list[int], spare: int) -> torch.Tensor:
    """[Tq, Tk]: segment by segment, as the reference masks them."""
    mask = torch.zeros(sum(queries) + spare, sum(keys) + spare, dtype=torch.bool)
    at = [0, 0]
    for lq, lk in zip(queries, keys, strict=True):
        hidden = visibility.hidden(lq, lk, torch.device("cpu"))
        block = torch.ones(lq, lk, dtype=torch.bool) if hidden is None else ~hidden
        mask[at[0] : at[0] + lq, at[1] : at[1] + lk] = block
        at = [at[0] + lq, at[1] + lk]
    return mask


def visited(numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[b, c]: the blocks that a kernel reads off the table of one kind of blocks."""
    table = torch.zeros(places.shape[-2:], dtype=torch.bool)
    for row, number in enumerate(numbers[0, 0].tolist()):
        listed = places[0, 0, row, :number]
        assert listed.unique().numel() == number, "a block twice"
        table[row, listed.long()] = True
    return table


QUERIES, KEYS = st.sampled_from([0, 1, 5, 127, 128, 200, 400]), st.sampled_from([0, 1, 90, 300])
LENGTHS = st.lists(st.tuples(QUERIES, KEYS), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    same=st.booleans(),
    causal=st.booleans(),
    window=st.none() | st.sampled_from([1, 40, 128, 200, 1000]),
    spare=st.sampled_from([0, 3]),
)
def test_the_blocks_are_those_of_the_mask(
    lengths: list[tuple[int, int]], same: bool, causal: bool, window: int | None, spare: int
) -> None:
    queries = [lq for lq, _ in lengths]
    keys = queries if same else [lk for _, lk in lengths]
    q, k = torch.empty(sum(queries) + spare, 1, 8), torch.empty(sum(keys) + spare, 1, 8)
    if not q.numel() or not k.numel():
        return
    visibility = Visibility(causal=causal, window=window, scale=1.0)
    mask = block_mask(q, k, segments(queries, keys), visibility)
    wanted = seen(visibility, queries, keys, spare)
    at_q, at_k = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None]
    assert torch.equal(mask.mask_mod(at_q, at_q, at_q, at_k), wanted)

    partly = visited(mask.kv_num_blocks, mask.kv_indices)
    whole = visited(mask.full_kv_num_blocks, mask.full_kv_indices)
    padded = torch.zeros(partly.shape[0] * BLOCK, partly.shape[1] * BLOCK, dtype=torch.bool)
    padded[: wanted.shape[0], : wanted.shape[1]] = wanted
    tiles = padded.view(partly.shape[0], BLOCK, partly.shape[1], BLOCK).transpose(1, 2).flatten(2)
    assert torch.equal(whole, tiles.all(-1))
    assert not bool((partly & whole).any())
    assert bool((partly | whole | ~tiles.any(-1)).all()), "a block that is seen is left out"
    if same:  # as in training: nothing is visited in vain
        assert torch.equal(partly | whole, tiles.any(-1))


def test_masks_are_kept_while_the_layout_is_the_same() -> None:
    op = flex.FlexAttention()
    q = torch.randn(300, 2, 16)
    packed, causal = segments([100, 200]), Visibility(causal=True, window=None, scale=1.0)
    first = op.plan(q, q, packed, causal).mask
    assert op.plan(q, q, packed, causal).mask is first
    capped = Visibility(causal=True, window=None, scale=0.5, softcap=3.0)
    assert op.plan(q, q, packed, capped).mask is first, "what is seen is the same"
    narrow = Visibility(causal=True, window=7, scale=1.0)
    assert op.plan(q, q, packed, narrow).mask is not first
    assert op.plan(q, q, segments([100, 200]), causal).mask is not first, "another tensor"
    assert op.plan(q, q, packed, causal).mask is first
    packed.cu_seqlens_q[1] = packed.cu_seqlens_k[1] = 150
    changed = op.plan(q, q, packed, causal).mask
    assert changed is not first
    assert int(changed.kv_num_blocks.sum() + changed.full_kv_num_blocks.sum()) == 5
    for window in range(1, KEPT + 2):
        op.plan(q, q, packed, Visibility(causal=True, window=window, scale=1.0))
    assert op.plan(q, q, packed, causal).mask is not changed, "kept for ever"


def test_a_mask_of_inference_is_not_trained_with() -> None:
    attend = resolve("attention", target=Target(), require="flex")
    q = torch.randn(6, 2, 8, requires_grad=True)
    where = {
        "cu_seqlens_q": ends([6]), "cu_seqlens_k": ends([6]), "max_seqlen_q": 6, "max_seqlen_k": 6,
    }  # fmt: skip
    for more in ({"uniform": (1, 6)}, {}):
        with torch.inference_mode():
            before, _ = attend(q, q, q, **where, **more)
        out, _ = attend(q, q, q, **where, **more)
        assert torch.equal(out, before)
        (grad,) = torch.autograd.grad(out.square().sum(), q)
        assert bool(grad.abs().sum() > 0)


def test_what_a_gpu_compiles_is_one_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced on CPU; each kind has code, and so variants and varying lengths, of its own."""
    real = torch.compile
    compiled: list[Callable[..., Any]] = []

    def on_cpu(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        assert options == {"fullgraph": True}
        compiled.append(fn)
        return real(fn, backend="eager", fullgraph=True)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "compile", on_cpu)
    q, k, v = torch.randn(260, 4, 16), torch.randn(260, 2, 16), torch.randn(260, 2, 24)
    packed = segments([100, 0, 160])
    for softcap in (3.0, None):
        visibility = Visibility(causal=True, window=50, scale=0.25, softcap=softcap)
        plan = flex.FlexAttention().plan(q, k, packed, visibility)
        fn = flex._compiled.__wrapped__(0.25, softcap, (4, 16))
        out, lse = fn(*(plan._heads_first(x) for x in (q, k, v)), plan.mask)
        expected, expected_lse = REFERENCE.plan(q, k, packed, visibility).forward(q, k, v)
        torch.testing.assert_close(out[0].transpose(0, 1), expected)
        torch.testing.assert_close(lse[0].t(), expected_lse)
    one, other = (fn.__code__ for fn in compiled)
    assert (one.co_name, other.co_name) == ("attend_4_16_0_25_3_0", "attend_4_16_0_25_None")


def test_a_graph_that_is_kept_is_gone_through_again() -> None:
    """And one that is not is freed at once, as torch's own are."""
    q, k, v = torch.randn(20, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    plan = flex.FlexAttention().plan(
        q, k, segments([20]), Visibility(causal=True, window=None, scale=0.25)
    )
    assert plan.mask is not None
    kept: list[torch.Tensor] = []

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept.extend((q, k, v))
        return flex._evaluated(q, k, v, mask, 0.25, None)

    leaves = [plan._heads_first(x).detach().requires_grad_() for x in (q, k, v)]
    results = flex.kept_once(run, *leaves, plan.mask)
    expected = torch.autograd.grad(
        [one.sum() for one in flex._evaluated(*leaves, plan.mask, 0.25, None)], leaves
    )
    total = results[0].sum() + results[1].sum()
    for keep in (True, False):
        found = torch.autograd.grad(total, leaves, retain_graph=keep)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    with pytest.raises(RuntimeError, match="graph was gone through before"):
        torch.autograd.grad(results[0].sum(), leaves)
    inner = [weakref.ref(one) for one in kept]
    kept.clear()
    gc.collect()
    assert not any(one() is not None for one in inner)
    with torch.no_grad():
        out, _ = flex.kept_once(run, *leaves, plan.mask)
    assert not out.requires_grad


def test_what_it_needs() -> None:
    gpu = Target(device_type="cuda", arch=(9, 0), dtype=torch.float32, head_dim=576)
    (row,) = [one for one in explain(gpu) if (one.op, one.name) == ("attention", "flex")]
    assert row.status == "refused"
    assert "needs a head size of at most 256, the target has 576" in row.reason
    assert "needs bfloat16 or float16, the target is float32" in row.reason
    turing = Target(device_type="cuda", arch=(7, 5), dtype=torch.float16)
    with pytest.raises(ValueError, match=r"'flex' cannot run on cuda sm_75 .* capability 8.0"):
        resolve("attention", target=turing, require="flex")
    assert resolve("attention", target=Target()).name == "sdpa", "on CPU by name only"


def test_capped_scores_on_cpu_and_short_ones_are_no_kernel_of_ones_own() -> None:
    q = torch.randn(300, 2, 16)
    capped = Visibility(causal=True, window=None, scale=1.0, softcap=3.0)
    assert isinstance(FlashAttention().plan(q, q, segments([300]), capped), PackedPlan)


# ------------------------------------------------------------------- on a GPU


@pytest.mark.parametrize(
    ("length", "kind"),
    [
        pytest.param(MIN_CAPPED, flex.FlexPlan, marks=GPU),
        pytest.param(MIN_CAPPED - 1, PackedPlan, marks=GPU),
    ],
)
def test_who_serves_capped_scores(length: int, kind: type) -> None:
    q = torch.randn(length, 2, 64, device="cuda", dtype=torch.bfloat16)
    capped = Visibility(causal=True, window=None, scale=1.0, softcap=3.0)
    where = segments([length], device="cuda")
    assert type(FlashAttention().plan(q, q, where, capped)) is kind


CASES: dict[str, tuple[list[int], list[int] | None, dict[str, Any]]] = {
    "equal, capped": ([192, 192], None, {"softcap": 5.0, "uniform": (2, 192)}),
    "ragged, window, capped": ([330, 1, 0, 67], None, {"softcap": 5.0, "window": 100}),
    "behind a cache, sinks": ([5, 170], [133, 290], {"sinks": True}),
    "more queries than keys": ([170, 20], [40, 20], {}),
    "rows of no segment, not causal": ([160, 20], None, {"extra": 7, "causal": False}),
    "NaN": ([192, 192], None, {"uniform": (2, 192), "nan": True}),
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(name, sizes, marks=GPU)
        for name, sizes in (
            *((name, (64, 64)) for name in CASES),
            ("ragged, window, capped", (40, 8)),
            ("behind a cache, sinks", (192, 128)),
            ("equal, capped", (flex.MAX_HEAD_DIM, flex.MAX_HEAD_DIM)),
        )
    ],
)
def test_it_is_the_reference(name: str, sizes: tuple[int, int]) -> None:
    queries, keys, options = CASES[name]
    options = dict(options)
    extra, with_sinks = options.pop("extra", 0), options.pop("sinks", False)
    with_nan = options.pop("nan", False)
    bounds = segments(queries, keys, device="cuda")
    where = {
        "cu_seqlens_q": bounds.cu_seqlens_q, "cu_seqlens_k": bounds.cu_seqlens_k,
        "max_seqlen_q": bounds.max_seqlen_q, "max_seqlen_k": bounds.max_seqlen_k,
    }  # fmt: skip
    torch.manual_seed(0)
    rows_q, rows_k = sum(queries) + extra, sum(keys or queries) + extra
    q = torch.randn(rows_q, 4, sizes[0], device="cuda").bfloat16()
    k, v = (torch.randn(rows_k, 2, size, device="cuda").bfloat16() for size in sizes)
    if with_nan:
        q[queries[0] // 2, 1, 5] = torch.nan
    sinks = torch.randn(4, device="cuda").bfloat16()
    grad = torch.randn(rows_q, 4, sizes[1], device="cuda").bfloat16()
    target = Target.of("cuda", dtype=torch.bfloat16, head_dim=sizes[0])
    ours = resolve("attention", target=target, require="flex")
    results = []
    for op, dtype in ((ours, torch.bfloat16), (REFERENCE, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        given = {**where, **options}
        more = {"sinks": sinks.to(dtype)} if with_sinks else {}
        out, lse = op(*leaves, **given, **more)
        found = [out.detach(), lse]
        if not with_nan:
            found += torch.autograd.grad(out, leaves, grad.to(dtype), retain_graph=True)
            merged = (out.detach() * 0.5).to(dtype)
            found += op.backward(
                grad.to(dtype), *leaves, out=merged, lse=lse.detach() + 0.7, **given
            )
        results.append(found)
    labels = ("out", "lse", "dq", "dk", "dv", "dq merged", "dk merged", "dv merged")
    for label, one, exact in zip(labels, *results, strict=False):
        assert_close(
            one, exact, dtype=one.dtype, slack=64.0 if label == "lse" else 8.0, floor=1.0,
            label=label,
        )  # fmt: skip
