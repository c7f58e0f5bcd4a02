"""A token's result has the same bits in every batch, and whole or in parts."""

import pytest
import torch
from torch import Tensor

from mcore_kernels import KernelConfig, Kernels, Target

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


def kernels(device: str, dtype: torch.dtype) -> Kernels:
    return Kernels(KernelConfig.batch_invariant(), Target.of(device, dtype=dtype))


def numbers(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def test_the_configuration() -> None:
    choices = Kernels(KernelConfig.batch_invariant(swiglu="reference")).choices()
    asked = ("linear", "rms_norm", "add_rms_norm", "layer_norm", "attention")
    assert {op for op, name in choices.items() if name == "invariant"} == set(asked)
    assert Kernels().choices()["linear"] == "reference"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_products_and_norms(device: str, dtype: torch.dtype) -> None:
    """Forward and gradient of a row, alone, in parts, behind others, and lying elsewhere."""
    ours = kernels(device, dtype)
    x, dy = (numbers(131, 1001, device=device, dtype=dtype) for _ in range(2))
    dy = dy.flip(0)
    weight, vector = (numbers(*s, device=device, dtype=dtype) for s in ((65, 1001), (1001,)))
    calls = {
        "linear": lambda a: ours.linear(a, weight),
        "rms_norm": lambda a: ours.rms_norm(a, vector, 1e-5),
        "layer_norm": lambda a: ours.layer_norm(a, vector, vector, 1e-5),
        "add_rms_norm": lambda a: ours.add_rms_norm(a, a, vector, 1e-5)[0],
    }
    for name, call in calls.items():

        def run(rows: Tensor | slice) -> tuple[Tensor, Tensor]:
            part = x[rows].detach().requires_grad_()
            y = call(part)  # noqa: B023 -- called in this round
            (dx,) = torch.autograd.grad(y, part, dy[rows, : y.shape[1]])
            return y.detach(), dx

        whole = run(slice(None))
        order = torch.randperm(131, generator=torch.Generator().manual_seed(0)).to(device)
        for rows in (slice(7, 8), slice(0, 2), slice(60, 131), slice(130, 131), order, order[:70]):
            for found, wanted in zip(run(rows), whole, strict=True):
                assert torch.equal(found, wanted[rows]), (name, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_among_other_segments_in_chunks_and_one_by_one(
    device: str, dtype: torch.dtype
) -> None:
    """Training sees a segment whole; serving sees a prompt in chunks, and then token by token."""
    attention = kernels(device, dtype).attention
    q, k, v = (
        numbers(150, heads, 24, device=device, dtype=dtype).roll(shift, 0)
        for heads, shift in ((4, 0), (2, 1), (2, 2))
    )
    for options in ({}, {"window": 40}, {"softcap": 2.0}):

        def run(bounds: list[tuple[int, int, int]]) -> list[tuple[Tensor, Tensor]]:
            """Segments that start at a row and have queries from b to c, behind what is before."""
            parts = [torch.cat([x[a + b : a + c] for a, b, c in bounds]) for x in (q,)]
            parts += [torch.cat([x[a : a + c] for a, _, c in bounds]) for x in (k, v)]
            counts = [[c - b for _, b, c in bounds], [c for *_, c in bounds]]
            ends = [torch.tensor([0, *n], device=device).cumsum(0).int() for n in counts]
            out, lse = attention(
                *parts, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=max(counts[0]),
                max_seqlen_k=max(counts[1]), **options,  # noqa: B023 -- called in this round
            )  # fmt: skip
            return list(zip(out.split(counts[0]), lse.split(counts[0]), strict=True))

        (whole,) = run([(20, 0, 110)])
        among = run([(0, 0, 20), (20, 0, 110), (130, 0, 9)])[1]
        twice = run([(20, 0, 110)] * 2)[1]
        for one, wanted in zip((*among, *twice), (*whole, *whole), strict=True):
            assert torch.equal(one, wanted)
        for b, c in ((0, 50), (50, 83), (83, 84), (84, 85), (109, 110)):
            (part,) = run([(20, b, c)])
            for one, wanted in zip(part, whole, strict=True):
                assert torch.equal(one, wanted[b:c]), (options, b, c)


def test_gradients_of_a_segment_do_not_depend_on_the_others(device: str) -> None:
    attention = kernels(device, torch.float32).attention
    parts = [numbers(70, 2, 8, device=device, dtype=torch.float32) for _ in range(3)]
    grads = []
    for lengths in ([33], [33, 37]):
        rows = sum(lengths)
        leaves = [x[:rows].clone().requires_grad_() for x in parts]
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": max(lengths)}
        out, _ = attention(*leaves, max_seqlen_k=max(lengths), **options)
        found = torch.autograd.grad(out.square().sum(), leaves)
        grads.append([grad[:33] for grad in found])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
