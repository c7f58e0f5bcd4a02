"""FlashAttention-4 on the head sizes that it is given, against the reference."""

import importlib.util
from typing import Any

import pytest
import torch

from mcore_kernels import Target, resolve
from mcore_kernels.ops.attention.reference import REFERENCE
from mcore_kernels.testing.compare import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def segments(queries: list[int], keys: list[int] | None = None) -> dict[str, Any]:
    keys = queries if keys is None else keys
    ends = [torch.tensor([0, *sizes]).cumsum(0).int().cuda() for sizes in (queries, keys)]
    return {
        "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1],
        "max_seqlen_q": max(queries), "max_seqlen_k": max(keys),
    }  # fmt: skip


CASES = {
    "equal": ([96, 96], None, {"uniform": (2, 96)}),
    "ragged": ([130, 1, 67], None, {}),
    "not causal": ([130, 1, 67], None, {"causal": False}),
    "window": ([150, 40], None, {"window": 33}),
    "window, equal, not causal": (
        [64, 64],
        None,
        {"causal": False, "window": 9, "uniform": (2, 64)},
    ),
    "behind a cache": ([5, 70], [133, 90], {}),
    "more queries than keys": ([70, 20], [40, 20], {}),
    "soft cap": ([100, 29], None, {"softcap": 5.0}),
    "sinks": ([100, 29], None, {"sinks": True}),
    "rows of no segment": ([60, 20], None, {"extra": 7}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [64, 128])
def test_it_is_the_reference(name: str, size: int) -> None:
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    queries, keys, options = CASES[name]
    options = dict(options)
    extra, with_sinks = options.pop("extra", 0), options.pop("sinks", False)
    where = segments(queries, keys)
    rows_q, rows_k = int(where["cu_seqlens_q"][-1]) + extra, int(where["cu_seqlens_k"][-1]) + extra
    torch.manual_seed(0)
    q = torch.randn(rows_q, 4, size, device="cuda").bfloat16()
    k, v = (torch.randn(rows_k, 2, size, device="cuda").bfloat16() for _ in range(2))
    if with_sinks:
        options["sinks"] = torch.randn(4, device="cuda").bfloat16()
    grad = torch.randn(rows_q, 4, size, device="cuda").bfloat16()
    ours = resolve(
        "attention", target=Target.of("cuda", dtype=torch.bfloat16, head_dim=size), require="flash4"
    )
    found, wanted = [], []
    for op, dtype, into in ((ours, torch.bfloat16, found), (REFERENCE, torch.float64, wanted)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        given = {**options, **({"sinks": options["sinks"].to(dtype)} if with_sinks else {})}
        out, lse = op(*leaves, **where, **given)
        into += [out.detach(), lse, *torch.autograd.grad(out, leaves, grad.to(dtype))]
    for label, one, exact in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert_close(
            one,
            exact,
            dtype=one.dtype,
            slack=64.0 if label == "lse" else 8.0,
            floor=1.0,
            label=label,
        )
