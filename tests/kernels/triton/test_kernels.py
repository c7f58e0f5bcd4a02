"""Triton kernels against the specification, under torch.compile, and beyond their limits."""

import copy
import dataclasses
import itertools
import os
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F

from mcore_kernels import (
    OPERATORS,
    KernelConfig,
    Kernels,
    LossTerms,
    Target,
    VocabShard,
    resolve,
    vocab_loss,
)
from mcore_kernels.ops.cross_entropy.loss import LossCall
from mcore_kernels.ops.norm_limits import MAX_HIDDEN
from mcore_kernels.quant.formats import E4M3
from mcore_kernels.testing import assert_matches_reference, conformance
from mcore_kernels.testing.case import Case
from mcore_kernels.testing.cases import cases

NAMES = [op for op, operator in OPERATORS.items() if operator.get("triton") is not None]

# The interpreter computes with numpy, which warns where a GPU keeps silent (exp of a large number).
# That of triton 3.6 also reads loop bounds in a way that numpy warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@pytest.mark.parametrize("op", NAMES)
def test_it_matches_the_specification(
    op: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter takes milliseconds for a program; a GPU takes all cases in all dtypes.
    every = 8 if target.interpret and "NIGHTLY" not in os.environ else 1
    if every > 1 and op in ("causal_conv1d", "ssd_scan", "gated_delta_rule"):
        monkeypatch.setattr(conformance, "cases", _few)  # they launch many programs
    done = assert_matches_reference(op, "triton", target=target, every=every)
    assert {line.partition(":")[0] for line in done} == {"float32", "bfloat16", "float16"}


FEW = (
    "one head",
    "ragged with silu",
    "rows of no document",
    "scattered",
    "NaN in another document",
)


def _few(op: str, *, seed: int) -> list[Case]:
    return [case for case in cases(op, seed=seed) if case.name in FEW]


def test_pages_in_parts_are_merged(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sequences: their keys are cut into parts, some of which a query does not see at all."""
    module = sys.modules[resolve("paged_attention", target=target, require="triton")._fn.__module__]
    monkeypatch.setattr(module, "_parts", lambda q, count, most_keys: 3)
    generator = torch.Generator().manual_seed(0)
    device = target.device_type
    q, keys, values = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((4, 4, 16), (9, 32, 2, 16), (9, 32, 2, 16))
    )
    table = torch.randperm(9, generator=generator)[:8].view(2, 4).to(device, torch.int32)
    arguments = {
        "block_table": table,
        "context_lengths": torch.tensor([100, 40], dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.tensor([0, 1, 4], dtype=torch.int32, device=device),
        "max_seqlen_q": 3,
        "sinks": torch.randn(4, generator=generator).to(device),
    }
    for window in (None, 20):
        found, wanted = (
            resolve("paged_attention", target=target, require=name)(
                q, keys, values, **arguments, window=window
            )
            for name in ("triton", "reference")
        )
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_it_is_chosen_here(target: Target) -> None:
    kernels = Kernels(KernelConfig(), target)
    # Torch's own product of 8 bits comes first where there is one.
    first = {"fp8_matmul": "native"} if target.device_type == "cuda" else {}
    assert {op: kernels.choices()[op] for op in NAMES} == {
        **dict.fromkeys(NAMES, "triton"),
        **first,
    }
    for one in (copy.deepcopy(kernels), pickle.loads(pickle.dumps(kernels))):
        assert one.choices() == kernels.choices()


def test_many_rows_per_program(target: Target) -> None:
    """More rows than one round of the backward's programs takes, for short and for long rows."""
    device = target.device_type
    norm = resolve("rms_norm", target=target, require="triton")
    reference = resolve("rms_norm", target=target, require="reference")
    for rows, hidden in ((700, 3), (40, 2050)) if device == "cpu" else ((70_001, 3), (9001, 4096)):
        x = torch.randn(rows, hidden, device=device, requires_grad=True)
        weight = torch.randn(hidden, device=device, requires_grad=True)
        dy = torch.randn(rows, hidden, device=device)
        found = torch.autograd.grad(norm(x, weight, 1e-5), (x, weight), dy)
        wanted = torch.autograd.grad(reference(x, weight, 1e-5), (x, weight), dy)
        torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[1], wanted[1], atol=2e-6 * rows**0.5, rtol=1e-4)


def test_a_sum_in_one_pass_is_two_operators(target: Target) -> None:
    """Bit for bit in 16 bits, gradients too, as of the implementations in plain torch."""
    fused = resolve("add_rms_norm", target=target, require="triton")
    norm = resolve("rms_norm", target=target, require="triton")
    # The interpreter cuts off what of a float32 is too much for bfloat16.
    dtype = torch.float16 if target.interpret else torch.bfloat16
    inputs = torch.randn(4, 9, 40, device=target.device_type).to(dtype).unbind(0)
    x, residual, dy, dtotal = inputs
    weight = torch.randn(40, device=target.device_type).to(dtype)
    leaves = [one.clone().requires_grad_() for one in (x, residual, weight)]
    one_pass = fused(*leaves, 1e-5)
    total = leaves[0] + leaves[1]
    two = norm(total, leaves[2], 1e-5), total
    grads = [torch.autograd.grad(one, leaves, (dy, dtotal)) for one in (one_pass, two)]
    for one, other in zip((*one_pass, *grads[0]), (*two, *grads[1]), strict=True):
        assert torch.equal(one, other)


def test_one_read_of_logits_is_two(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The maximum while the sum is taken: over several pieces of a row, of which some are -inf."""
    module = sys.modules[resolve("cross_entropy", target=target, require="triton")._fn.__module__]
    monkeypatch.setattr(module, "_options", lambda z: {"BLOCK": 16, "num_warps": 1})
    op = resolve("cross_entropy", target=target, require="triton")
    logits = torch.randn(6, 70, device=target.device_type).mul(20.0)
    logits[1, :40] = -torch.inf
    logits[2, 50:] = -torch.inf
    logits[3, 33] = torch.nan
    logits[4] = 3e4
    logits[5] = -torch.inf
    labels = torch.tensor([69, 45, 3, 4, 70, -1], device=target.device_type)
    maximum, sums = op.statistics(logits, labels)
    wanted = op.local_max(logits)
    both = op.partials(logits, labels, wanted, smoothing=False)
    assert sums[0, 3].isnan()
    assert sums[:, 5].tolist() == [0.0, 0.0, 0.0]
    assert maximum[5] == -torch.inf
    rows = [0, 1, 2, 4]
    assert torch.equal(maximum[rows], wanted[rows])
    torch.testing.assert_close(sums[:, rows], both[:, rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shards", [1, 3])
def test_losses_over_shards_read_once(target: Target, shards: int) -> None:
    """As torch has it, where a shard's own maximum is not that of all; one shard has no columns."""
    op = resolve("cross_entropy", target=target, require="triton")
    logits = torch.randn(5, 31, device=target.device_type).mul(3.0)
    logits[2] = torch.arange(31.0, device=target.device_type)  # rises from shard to shard
    labels = torch.tensor([0, 10, 30, 12, 8], device=target.device_type)
    bounds = [0, 9, 9, 31] if shards == 3 else [0, 31]
    pieces = [logits[:, a:b] for a, b in itertools.pairwise(bounds)]
    tops = torch.stack([op.statistics(z, labels)[0] for z in pieces]).amax(0)
    found = []
    for index, z in enumerate(pieces):
        shard = VocabShard(
            vocab_size=31, first=bounds[index], reduce_max=lambda own: tops if shards > 1 else own
        )
        call = LossCall(op=op, shard=shard, terms=LossTerms(), on_all=0.0, entropy=False)
        found.append(call.forward(z, labels).sums)
    sums = torch.stack(found).sum(0)
    torch.testing.assert_close(
        sums[0].log() - sums[1], F.cross_entropy(logits, labels, reduction="none")
    )


@pytest.mark.parametrize("name", ["reference", "triton", "native", "hopper"])
@pytest.mark.parametrize("counts", [(3, 0, 9), (0, 0, 0)])
def test_first_gradients_of_experts_are_written_over(
    target: Target, name: str, counts: tuple[int, ...]
) -> None:
    """Whatever the buffer has, NaN too; an expert without rows has zeros."""
    wide = target.device_type == "cuda"
    target = dataclasses.replace(target, dtype=torch.bfloat16 if wide else torch.float32)
    if name in ("native", "hopper") and not wide:
        return
    op = resolve("grouped_linear", target=target, require=name)
    generator = torch.Generator().manual_seed(0)
    sizes = (128, 40) if name == "hopper" else (24, 40)
    dy, x = (
        torch.randn(sum(counts), size, generator=generator).to(target.device_type, target.dtype)
        for size in sizes
    )
    written = torch.full((3, *sizes), torch.nan, device=target.device_type)
    op.write_weight_grad(dy, x, counts, written)
    added = torch.zeros_like(written)
    op.weight_grad(dy, x, counts, added)
    assert torch.equal(written, added)
    assert not written[1].any()


def test_what_it_cannot_take_goes_to_the_declared_second(target: Target) -> None:
    device = target.device_type
    norm = resolve("rms_norm", target=target, require="triton")
    reference = resolve("rms_norm", target=target, require="reference")
    for shape, dtype in (((2, MAX_HIDDEN + 1), torch.float32), ((2, 8), torch.float64)):
        x, weight = torch.randn(*shape, dtype=dtype, device=device), torch.ones(shape[-1])
        weight = weight.to(device, dtype)
        assert torch.equal(norm(x, weight, 1e-5), reference(x, weight, 1e-5))
    swiglu = resolve("swiglu", target=target, require="triton")
    x = torch.randn(2, 8, dtype=torch.float64, device=device)
    assert torch.equal(swiglu(x), resolve("swiglu", target=target, require="reference")(x))


def test_the_widest_row_it_takes(target: Target) -> None:
    device = target.device_type
    x = torch.randn(2, MAX_HIDDEN, device=device, requires_grad=True)
    weight = torch.ones(MAX_HIDDEN, device=device, requires_grad=True)
    norm = resolve("rms_norm", target=target, require="triton")
    reference = resolve("rms_norm", target=target, require="reference")
    dy = torch.randn_like(x)
    found = torch.autograd.grad(norm(x, weight, 1e-5), (x, weight), dy)
    wanted = torch.autograd.grad(reference(x, weight, 1e-5), (x, weight), dy)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_results_repeat_bit_for_bit(target: Target) -> None:
    x = torch.randn(300, 40, device=target.device_type, requires_grad=True)
    weight = torch.randn(40, device=target.device_type, requires_grad=True)
    norm = resolve("rms_norm", target=target, require="triton")

    def run() -> tuple[torch.Tensor, ...]:
        y = norm(x, weight, 1e-5)
        return y, *torch.autograd.grad(y.square().sum(), (x, weight))

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one, other)


def test_odd_width_is_an_error(target: Target) -> None:
    swiglu = resolve("swiglu", target=target, require="triton")
    with pytest.raises(ValueError, match="so it is even; got 7"):
        swiglu(torch.ones(2, 7, device=target.device_type))


def test_what_torch_asks_of_an_operator(target: Target) -> None:
    """Schema, fake results and autograd registration hold (torch's own checker)."""
    device = target.device_type
    norm = resolve("rms_norm", target=target, require="triton")
    swiglu = resolve("swiglu", target=target, require="triton")
    x = torch.randn(3, 5, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    norm(x, weight, 1e-5)
    swiglu(x)
    kernels = torch.ops.mcore_kernels
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (x, x.detach(), weight, None, 1e-5, False, True, False)
    torch.library.opcheck(kernels.norm.default, arguments, test_utils=checks)
    arguments = (x, weight.detach(), x.detach()[..., 0], 3, True, 1.0, 0.5)
    torch.library.opcheck(kernels.activation.default, arguments, test_utils=checks)


def test_differentiating_twice_is_an_error(target: Target) -> None:
    x = torch.randn(3, 8, device=target.device_type, requires_grad=True)
    swiglu = resolve("swiglu", target=target, require="triton")
    (found,) = torch.autograd.grad(swiglu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        found.sum().backward()


# torch's tracer makes an instance of every autograd function, against its own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_losses_pages_and_eight_bits_compile_in_one_graph(target: Target) -> None:
    """What eager code launches without torch's dispatch is an operator where a compiler traces."""
    device = target.device_type
    loss, pages, quantize, matmul = (
        resolve(op, target=target, require="triton")
        for op in ("cross_entropy", "paged_attention", "quantize", "fp8_matmul")
    )
    labels = torch.tensor([3, -100, 0, 8], device=device)
    table, lengths, ends = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in ([[1], [0]], [3, 2], [0, 3, 4])
    )

    def network(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        terms = LossTerms(label_smoothing=0.1, z_loss=0.01)
        found = vocab_loss(
            z, labels, op=loss, shard=VocabShard(vocab_size=9), terms=terms, entropy=True
        )
        plain = vocab_loss(z, labels, op=loss, shard=VocabShard(vocab_size=9))
        x = z.detach()
        q, cache = x[:, None, :8], x[None, :, None, :8].expand(2, 4, 1, 8)
        served, _ = pages(
            q, cache, cache, block_table=table, context_lengths=lengths, cu_seqlens_q=ends,
            max_seqlen_q=3, window=2,
        )  # fmt: skip
        given = quantize.both(x, E4M3, scale=torch.full((1, 1), 0.1, device=device))
        products = []
        for block in ((0, 0), (1, 0), (1, 128), (128, 128)):
            a, b = quantize.both(x, E4M3, block), quantize(x.t(), E4M3, block)
            products += [
                matmul(a[0], a[1], a[0], a[1], a_block=block, b_block=block, dtype=x.dtype),
                matmul(a[2], a[3], *b, a_block=block, b_block=block, dtype=x.dtype),
            ]
        total = found.loss.sum() + found.entropy.square().sum() + plain.loss.sum()
        return total, served, *products, quantize.amax(x), *(one.float() for one in given)

    z = torch.randn(4, 9, device=device, requires_grad=True)
    results = []
    for run in (network, torch.compile(network, backend="aot_eager", fullgraph=True)):
        results.append([*run(z), *torch.autograd.grad(run(z)[0], z)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["triton", "native", "hopper"])
@pytest.mark.parametrize("frozen", [False, True])
def test_experts_compile_in_one_graph(target: Target, name: str, frozen: bool) -> None:
    """Counts are read when the graph runs; a frozen weight has no gradient."""
    wide = target.device_type == "cuda"
    if name != "triton" and not wide:
        return
    target = dataclasses.replace(target, dtype=torch.bfloat16 if wide else torch.float32)
    op = resolve("grouped_linear", target=target, require=name)
    width = 128 if wide else 16
    x = torch.randn(9, 16, device=target.device_type, dtype=target.dtype, requires_grad=True)
    weight = torch.randn(3, width, 16, device=target.device_type, dtype=target.dtype)
    weight.requires_grad_(not frozen)
    leaves = (x,) if frozen else (x, weight)
    counts = torch.tensor([4, 0, 5], device=target.device_type)
    results = []
    for run in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
        y = run(x, weight, counts)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_they_compile_in_one_graph(target: Target) -> None:
    device = target.device_type
    kernels = Kernels(KernelConfig(), target)
    x = torch.randn(6, 16, device=device, requires_grad=True)
    weight = torch.linspace(0.5, 1.5, 16, device=device).requires_grad_()

    def network(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.swiglu(kernels.rms_norm(x, weight, 1e-5)).square().sum()

    expected = torch.autograd.grad(network(x, weight), (x, weight))
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x, weight), (x, weight))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
