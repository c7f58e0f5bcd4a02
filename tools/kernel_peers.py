"""Kernels of other libraries on the device here, in the words of `mcore-kernels bench`.

    python tools/kernel_peers.py [FILE.json]

Liger, quack, FlashAttention-4, flash-linear-attention and Transformer Engine are measured where
they are installed, by the same clock and on the same sizes: 16,384 × 4,096 for norms and
activations, attention of 32 query and 8 kv heads of 128 at 8,192 tokens, the head of Llama 3 over
128,256 classes.
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


def together(  # noqa: PLR0917 -- one table's columns
    library: str, name: str, call: Callable[..., Any], inputs: list[torch.Tensor],
    forward: tuple[float, float], backward: tuple[float, float],
) -> Iterator[Call]:  # fmt: skip
    """For what keeps nothing after its backward: forward, and forward with backward."""
    grad = torch.ones_like(call(*inputs))

    def run() -> None:
        call(*inputs).backward(grad)
        for one in inputs:
            one.grad = None

    yield library, f"{name} forward", lambda: call(*[x.detach() for x in inputs]), *forward
    num_bytes, flops = (one + other for one, other in zip(forward, backward, strict=True))
    yield library, f"{name} both ways", run, num_bytes, flops


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


ENGINE = "Transformer Engine"


def engine_norms() -> Iterator[Call]:
    import transformer_engine.pytorch as te

    x = tensor(16_384, 4096)
    size = 2.0 * x.numel()
    for name, made in (("rms_norm", te.RMSNorm), ("layer_norm", te.LayerNorm)):
        norm = made(4096, params_dtype=torch.bfloat16, device="cuda")
        run = lambda a, *_, norm=norm: norm(a)  # noqa: E731
        yield from together(
            ENGINE, name, run, [x, *norm.parameters()], (2 * size, 0.0), (3 * size, 0.0)
        )


def engine_activations() -> Iterator[Call]:
    import transformer_engine_torch as tex

    x, grad = tensor(16_384, 16_384).detach(), tensor(16_384, 8192).detach()
    size = 2.0 * grad.numel()
    yield ENGINE, "swiglu forward", lambda: tex.swiglu(x, None), 3 * size, 0.0
    yield ENGINE, "swiglu backward", lambda: tex.dswiglu(grad, x, None), 5 * size, 0.0


def engine_rope() -> Iterator[Call]:
    from transformer_engine.pytorch.attention import RotaryPositionEmbedding
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles = RotaryPositionEmbedding(128)(16_384).cuda()
    heads = tensor(16_384, 1, 40, 128)
    size = 2.0 * 2 * heads.numel()
    run = lambda a: apply_rotary_pos_emb(a, angles, tensor_format="sbhd", fused=True)  # noqa: E731
    yield from together(ENGINE, "rope", run, [heads], (size, 0.0), (size, 0.0))


def engine_permutation() -> Iterator[Call]:
    import transformer_engine.pytorch as te

    tokens, top, experts = 16_384, 2, 8
    x = tensor(tokens, 4096).detach()
    chosen = torch.rand(tokens, experts, device="cuda").topk(top).indices.int()
    rows, where = te.moe_permute(x, chosen, tokens * top, map_type="index")
    weights = torch.rand(tokens, top, device="cuda")
    size = 2.0 * (top + 1) * x.numel()
    there = lambda: te.moe_permute(x, chosen, tokens * top, map_type="index")  # noqa: E731
    back = lambda: te.moe_unpermute(rows, where, weights, map_type="index")  # noqa: E731
    yield ENGINE, "moe_permute there", there, size, 0.0
    yield ENGINE, "moe_permute and back", back, size, 0.0


def engine_adam() -> Iterator[Call]:
    from transformer_engine.pytorch.optimizers import FusedAdam

    weight = torch.nn.Parameter(torch.randn(2**28, device="cuda").bfloat16())
    optimizer = FusedAdam([weight], lr=1e-4, master_weights=True, use_decoupled_grad=True)
    weight.decoupled_grad = torch.randn(2**28, device="cuda")  # type: ignore[attr-defined]
    # Gradient, master weight and two moments read, three of them written, and the copy.
    num_bytes = (7 * 4.0 + 2) * weight.numel()
    yield ENGINE, "adam, step with a bfloat16 copy", optimizer.step, num_bytes, 0.0


def engine_loss() -> Iterator[Call]:
    import transformer_engine.pytorch as te

    logits, labels = tensor(1, 4096, 32_768), torch.arange(4096, device="cuda")[None]
    size = 2.0 * logits.numel()
    # The forward keeps the gradient, in a copy, and the backward scales it.
    run = lambda a: te.parallel_cross_entropy(a, labels)  # noqa: E731
    yield from together(ENGINE, "cross_entropy", run, [logits], (2 * size, 0.0), (2 * size, 0.0))


def engine_attention() -> Iterator[Call]:
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(32, 128, num_gqa_groups=8, attn_mask_type="causal")
    for length in (8192, 32_768):
        q, k, v = (tensor(length, 1, heads, 128) for heads in (32, 8, 8))
        flops = 2.0 * length**2 * 32 * 128
        yield from together(
            ENGINE, f"attention {length}", module, [q, k, v], (0.0, flops), (0.0, 2.5 * flops)
        )


def engine_linear() -> Iterator[Call]:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    rows, inner, outer = 8192, 4096, 14_336
    flops = 6.0 * rows * inner * outer
    linear = te.Linear(
        inner, outer, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True
    )
    linear.weight.main_grad = torch.zeros(outer, inner, device="cuda")
    x, grad = tensor(rows, inner), tensor(rows, outer).detach()
    recipes = {
        "bfloat16": None,
        "8 bits, scales of tensors": recipe.Float8CurrentScaling(),
        "8 bits, delayed scales of tensors": recipe.DelayedScaling(),
        "8 bits, scales of blocks": recipe.Float8BlockScaling(),
    }
    for name, chosen in recipes.items():
        first = True

        def run(chosen: Any = chosen) -> None:
            nonlocal first
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                result = linear(x, is_first_microbatch=first)
            first = False
            result.backward(grad)
            x.grad = None

        try:
            run()
        except Exception as error:  # this device or library cannot: the others are measured still
            print(f"{ENGINE}, linear in {name}: {type(error).__name__}: {error}", flush=True)
            continue
        yield ENGINE, f"linear both ways, {name}", run, 0.0, flops


def engine_experts() -> Iterator[Call]:
    import transformer_engine.pytorch as te

    rows, experts = 131_072, 128
    for name, inner, outer in (("up", 2048, 1536), ("down", 768, 2048)):
        module = te.GroupedLinear(
            experts, inner, outer, bias=False, params_dtype=torch.bfloat16,
            fuse_wgrad_accumulation=True,
        )  # fmt: skip
        weights = list(module.parameters())
        for weight in weights:
            weight.main_grad = torch.zeros(outer, inner, device="cuda")
        x, grad = tensor(rows, inner), tensor(rows, outer).detach()
        counts = [rows // experts] * experts
        flops = 2.0 * rows * inner * outer
        forward = lambda m=module, a=x, c=counts: m(a.detach(), c)  # noqa: E731

        def run(module: Any = module, x: Any = x, grad: Any = grad, counts: Any = counts) -> None:
            module(x, counts).backward(grad)
            x.grad = None

        yield ENGINE, f"experts {name} forward", forward, 0.0, flops
        yield ENGINE, f"experts {name} forward and both gradients", run, 0.0, 3 * flops


GROUPS = (
    liger_norms, quack_norms, activations, head, attention, state_space,
    engine_norms, engine_activations, engine_rope, engine_permutation, engine_adam, engine_loss,
    engine_attention, engine_linear, engine_experts,
)  # fmt: skip


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print(
            "kernel_peers: these libraries need a CUDA device, and there is none", file=sys.stderr
        )
        return 2
    device = torch.device("cuda")
    limits = measure_limits(device, torch.bfloat16)
    found = []
    for group in GROUPS:
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
