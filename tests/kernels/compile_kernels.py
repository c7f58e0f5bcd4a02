"""Compile every Triton kernel for a GPU that is not here, and print how many; no test by itself.

    python compile_kernels.py ARCH [OPERATOR ...]   # 90 for Hopper

Every operator is run on the cases of the conformance suite and on sizes of real models. Instead of
launching a kernel, it is compiled down to machine code for the arguments given, which is what the
interpreter cannot vouch for.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from mcore_kernels import (
    OPERATORS,
    Assignment,
    RoutingRule,
    Target,
    custom_ops,
    resolve,
    rope_cos_sin,
)
from mcore_kernels.ops.grouped_linear import hopper
from mcore_kernels.ops.grouped_linear.fp8 import Fp8GroupedLinear
from mcore_kernels.ops.ssd_scan.limits import MAX_FLOAT32
from mcore_kernels.quant import Fp8Recipe
from mcore_kernels.testing import conformance
from mcore_kernels.testing.cases import cases

SHARED_MEMORY = 227 * 1024
"""What a kernel may use of it on Hopper and later."""


class ElsewhereDriver:
    """What Triton asks about the device that it compiles for."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


# What the assembler lost has the stack's pointer in its place.
_STORES_NOTHING = re.compile(r"\b(?:ST[GS][.\w]*\b[^;]*\]|F2FP[^;]*), R1 ;")


def _lost_values(machine_code: bytes) -> list[str]:
    """Instructions that store or join what no instruction computes."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        said = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return _STORES_NOTHING.findall(said.stdout)


compiled: dict[str, set[str]] = {}
_launch = JITFunction.run


def _compile(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    kernel = _launch(self, *args, grid=grid, warmup=True, **options)
    if kernel is not None:
        # No AssertionError: those of comparisons are passed over.
        if kernel.metadata.shared > SHARED_MEMORY:
            raise RuntimeError(f"{self.__name__} takes {kernel.metadata.shared} bytes")
        if kernel.hash not in compiled.setdefault(self.__name__, set()):
            compiled[self.__name__].add(kernel.hash)
            lost = _lost_values(kernel.asm["cubin"])
            if lost:
                raise RuntimeError(f"{self.__name__} has lost a value: {lost[0]}")
    return kernel


def real_calls(op: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Positional arguments (and last the keywords) of calls with sizes of real models."""

    def x(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    if op in ("rms_norm", "l2_norm"):
        for hidden in (128, 4096, 16_384):
            yield (x(40, hidden), *([x(hidden)] if op == "rms_norm" else []), 1e-5, {})
    if op == "add_rms_norm":
        yield x(40, 8192), x(40, 8192), x(8192), 1e-5, {"zero_centered": True}
    if op == "layer_norm":
        yield x(40, 12_288), x(12_288), x(12_288), 1e-5, {}
    if op == "swiglu":
        yield x(4, 2 * 14_336), {}
    if op == "glu":
        yield x(4, 2 * 2880), x(2 * 2880), {"activation": "quick_gelu", "limit": 7.0, "offset": 1.0}
    if op == "rope":
        yield x(4, 32, 128), x(4, 8, 128), *rope_cos_sin(torch.arange(4), 128), {}
    if op == "causal_conv1d":
        ends = torch.tensor([0, 64], dtype=torch.int32)
        yield x(64, 4352), x(4352, 4), x(4352), {"cu_seqlens": ends, "silu": True}
    if op == "ssd_scan":
        for heads, size, groups, state in ((64, 64, 1, 128), (24, 64, 8, 64), (8, 128, 1, 256)):
            if dtype == torch.float32 and size * state > MAX_FLOAT32:
                continue
            ends = torch.tensor([0, 500, 640], dtype=torch.int32)
            grouped = (640, groups, state)
            yield (
                x(640, heads, size),
                x(640, heads),
                torch.zeros(heads),
                x(*grouped),
                x(*grouped),
                {"cu_seqlens": ends, "max_seqlen": 500, "d": torch.ones(heads)},
            )
    if op == "gated_delta_rule":
        for heads, size in (((16, 32), 128), ((4, 4), 64)):
            ends = torch.tensor([0, 500, 640], dtype=torch.int32)
            q, v, of_head = (640, heads[0], size), (640, heads[1], size), (640, heads[1])
            given = (x(*q), x(*q), x(*v), x(*of_head), x(*of_head))
            yield *given, {"cu_seqlens": ends, "max_seqlen": 500}
    if op == "grouped_linear":
        yield x(1024, 2048), x(16, 1536, 2048), torch.full((16,), 64), {}
    if op == "sample":
        rows = torch.ones(4)
        cuts = {"top_k": torch.full((4,), 50), "top_p": rows.double(), "min_p": rows}
        for given in ({}, {"top_k": cuts["top_k"]}, {"top_p": cuts["top_p"]}, cuts):
            yield x(4, 151_936).detach(), rows.double(), {"temperature": rows, **given}
    if op == "moe_route":
        yield x(64, 128), None, {"rule": RoutingRule(top_k=8, normalise=True)}
        deepseek = RoutingRule(
            top_k=8, score="sigmoid", normalise=True, scale=2.5, num_groups=8, top_groups=4
        )
        yield x(64, 256), torch.zeros(256), {"rule": deepseek}
    if op == "paged_attention":
        for head in (64, 128, 256):
            cache = torch.zeros(8, 64, 8, head, dtype=dtype)
            for new in (1, 512):
                lengths = torch.full((1,), 512, dtype=torch.int32)
                yield (
                    x(new, 64, head).detach(),
                    cache,
                    cache,
                    {
                        "block_table": torch.arange(8, dtype=torch.int32).unsqueeze(0),
                        "context_lengths": lengths,
                        "cu_seqlens_q": torch.tensor([0, new], dtype=torch.int32),
                        "max_seqlen_q": new,
                    },
                )


def run_real(op: str, call: Any, dtype: torch.dtype) -> None:
    if op == "cross_entropy":
        logits, labels = torch.zeros(4, 128_256, dtype=dtype), torch.zeros(4, dtype=torch.int64)
        maximum = call.local_max(logits)
        sums = call.partials(logits, labels, maximum, smoothing=True)
        call.statistics(logits, labels)
        call.backward(
            logits, labels, maximum, sums[0], maximum, on_target=1.0, on_all=0.0, out=logits
        )
    if op == "grouped_linear":
        dy, x = torch.zeros(16, 256, dtype=dtype), torch.zeros(16, 512, dtype=dtype)
        call.write_weight_grad(dy, x, (8, 8), torch.zeros(2, 256, 512))
        if dtype == torch.bfloat16 and triton.runtime.driver.active.get_current_target().arch == 90:
            weight = torch.zeros(2, 256, 512, dtype=dtype)
            hopper.GROUPED.forward(x, weight, (8, 8))
            hopper.GROUPED.input_grad(dy, weight, (8, 8))
            hopper.GROUPED.weight_grad(dy, x, (8, 8), torch.zeros(2, 256, 512))
            hopper.GROUPED.write_weight_grad(dy, x, (8, 8), torch.zeros(2, 256, 512))
    if op == "moe_permute":
        assignment = Assignment.of(torch.arange(128).view(16, 8) % 64, 64)
        rows = call.permute(torch.zeros(16, 4096, dtype=dtype, requires_grad=True), assignment)
        call.unpermute(rows, torch.ones(16, 8, requires_grad=True), assignment).sum().backward()
    if op == "fp8_grouped":
        for scaling, grad in (("tensor", "e5m2"), ("row", "e4m3"), ("block", "e4m3")):
            recipe = Fp8Recipe(scaling=scaling, grad_format=grad)
            experts = Fp8GroupedLinear(recipe, 4, emulate=True, op=call)
            x, weight = torch.zeros(512, 2048, dtype=dtype), torch.zeros(4, 1536, 2048, dtype=dtype)
            counts = torch.full((4,), 128)
            experts(x.requires_grad_(), weight.requires_grad_(), counts).sum().backward()
    for *arguments, options in real_calls(op, dtype):
        results = call(*arguments, **options)
        first = results[0] if isinstance(results, tuple) else results
        if first.requires_grad:
            first.sum().backward()


def main(arch: int, operators: list[str]) -> None:
    triton.runtime.driver.set_active(ElsewhereDriver(arch))
    JITFunction.run = _compile
    custom_ops.interpreted = lambda x: False
    for op in operators:
        for dtype in (torch.bfloat16, torch.float32):
            call = resolve(op, target=Target(dtype=dtype, interpret=True), require="triton")
            for case in cases(op):
                # Nothing is computed, so nothing is right.
                try:
                    conformance._compare(op, call, case, dtype, "cpu", op)
                except (AssertionError, IndexError):
                    continue
            run_real(op, call, dtype)
    print(sum(len(hashes) for hashes in compiled.values()), *sorted(compiled))


if __name__ == "__main__":
    names = [op for op, operator in OPERATORS.items() if operator.get("triton") is not None]
    main(int(sys.argv[1]), sys.argv[2:] or names)
