"""Kernels of other libraries on the device here, in the words of `mcore-kernels bench`.

    python tools/kernel_peers.py [FILE.json]

Liger, quack, FlashAttention-4 and flash-linear-attention are measured where they are installed, by
the same clock and on the same sizes: 16,384 × 4,096 for norms and activations, attention of 32
query and 8 kv heads of 128 at 8,192 tokens, the head of Llama 3 over 128,256 classes.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mcore_kernels.bench import measure_limits, timing

Call = tuple[str, str, Callable[[], object], float, float]
"""Library, what it does, the call, bytes that have to move, operations."""


def tensor(*shape: int, scale: float = 1.0) -> torch.Tensor:
    drawn = torch.randn(*shape, device="cuda") * scale
    return drawn.bfloat16().requires_grad_()


def both(  # noqa: PLR0917 -- one table's columns
    library: str, name: str, call: Callable[..., Any], inputs: list[torch.Tensor],
    forward: tuple[float, float], backward: tuple[float, float],
) -> Iterator[Call]:  # fmt: skip
    result = call(*inputs)
    result = result[0] if isinstance(result, tuple) else result
    grad = torch.ones_like(result)
    yield library, f"{name} forward", lambda: call(*[x.detach() for x in inputs]), *forward
    yield (
        library,
        f"{name} backward",
        lambda: torch.autograd.grad(result, inputs, grad, retain_graph=True),
        *backward,
    )


def liger_norms() -> Iterator[Call]:
    x, weight = tensor(16_384, 4096), tensor(4096)
    size = 2.0 * x.numel()
    bytes_moved = (2 * size, 0.0), (3 * size, 0.0)
    from liger_kernel.transformers.functional import liger_rms_norm

    yield from both(
        "Liger", "rms_norm", lambda a, w: liger_rms_norm(a, w, 1e-5), [x, weight], *bytes_moved
    )


def quack_norms() -> Iterator[Call]:
    from quack import rmsnorm

    x, weight = tensor(16_384, 4096), tensor(4096)
    size = 2.0 * x.numel()
    yield from both("quack", "rms_norm", rmsnorm, [x, weight], (2 * size, 0.0), (3 * size, 0.0))


def activations() -> Iterator[Call]:
    from liger_kernel.transformers.functional import liger_swiglu

    gate, up = tensor(16_384, 8192), tensor(16_384, 8192)
    size = 2.0 * gate.numel()
    yield from both("Liger", "swiglu", liger_swiglu, [gate, up], (3 * size, 0.0), (5 * size, 0.0))


def head() -> Iterator[Call]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    hidden, weight = tensor(8192, 4096), tensor(128_256, 4096, scale=0.02)
    labels = torch.arange(8192, device="cuda")

    def run() -> object:
        loss = liger_fused_linear_cross_entropy(hidden, weight, labels)
        return torch.autograd.grad(loss, (hidden, weight))

    yield "Liger", "head_loss loss and both gradients", run, 0.0, 6.0 * 8192 * 4096 * 128_256


def attention() -> Iterator[Call]:
    from flash_attn.cute import flash_attn_func

    for length in (4096, 8192, 16_384, 32_768):
        q, k, v = (tensor(1, length, heads, 128) for heads in (32, 8, 8))
        flops = 2.0 * length**2 * 32 * 128
        yield from both(
            "FlashAttention-4", f"attention {length}",
            lambda a, b, c: flash_attn_func(a, b, c, causal=True), [q, k, v],
            (0.0, flops), (0.0, 2.5 * flops),
        )  # fmt: skip


def state_space() -> Iterator[Call]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    tokens, heads = 4096, 32
    q, k, v = (tensor(1, tokens, heads, 128, scale=0.1) for _ in range(3))
    g = F.logsigmoid(torch.randn(1, tokens, heads, device="cuda"))
    beta = torch.rand(1, tokens, heads, device="cuda").bfloat16()
    size = 2.0 * 4 * q.numel()
    run = lambda: chunk_gated_delta_rule(q.detach(), k.detach(), v.detach(), g, beta)  # noqa: E731
    yield "flash-linear-attention", "gated_delta_rule forward", run, size, 0.0


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print(
            "kernel_peers: these libraries need a CUDA device, and there is none", file=sys.stderr
        )
        return 2
    device = torch.device("cuda")
    limits = measure_limits(device, torch.bfloat16)
    found = []
    for group in (liger_norms, quack_norms, activations, head, attention, state_space):
        try:
            for library, name, run, num_bytes, flops in group():
                time = timing(run, device, 15)
                least = limits.seconds(num_bytes=num_bytes, flops=flops)
                row = {
                    "library": library, "call": name, "median_s": time.median,
                    "spread": time.spread, "of_limit": least / time.median,
                }  # fmt: skip
                found.append(row)
                print(
                    f"{library:<24} {name:<36} {time.median * 1e3:8.3f} ms {time.spread:6.0%} "
                    f"{row['of_limit']:8.2f}",
                    flush=True,
                )
        except Exception as error:  # a library that is not here, or not made for this device
            said = str(error).partition("\n")[0]
            print(f"{group.__name__}: left out, {type(error).__name__}: {said}", flush=True)
    if arguments:
        Path(arguments[0]).write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
