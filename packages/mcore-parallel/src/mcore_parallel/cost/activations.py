"""Bytes of a forward pass that its backward pass needs, part by part, on one rank.

Activations are bf16, in front of fp8 products fp8. Without recomputation, and with scores that are
written out, these are the formulas of Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from mcore_parallel.cost.parts import AttentionShape, ExpertsShape, MLPShape, Part, Recurrent
from mcore_parallel.cost.place import Place
from mcore_parallel.cost.work import Workload

_BF16 = 2.0


def kept_by_norm(hidden: int, place: Place, work: Workload) -> float:
    """Return the bytes of what goes into the norm of a part, and comes out of it."""
    out = 0.0 if work.recomputes("norm") else _size(work)
    dropped = 1.0 if work.runtime.dropout else 0.0
    return place.share * hidden * (_BF16 + out + dropped)


def _size(work: Workload) -> float:
    """Bytes of an element that products keep."""
    return 1.0 if work.precision.format == "fp8" else _BF16


def kept_by_part(part: Part, hidden: int, place: Place, work: Workload) -> float:
    """Return the bytes that the backward of a part needs beside that."""
    runtime, tokens, tp = work.runtime, place.tokens, place.tp
    byte, kept = _size(work), 0.0
    inner = 0.0 if work.recomputes("act") else byte
    if isinstance(part, AttentionShape):
        heads = part.num_heads / tp
        keys = part.kv_width / min(tp, part.kv_heads)
        if not (part.kv_rank and work.recomputes("up")):
            kept += tokens * (heads * part.head_size + keys) * _BF16
        kept += tokens * heads * part.values * _BF16 * (2 if part.gate else 1)
        again = work.recomputes("core_attn")
        if runtime.fused_attention and not again:  # log-sum-exp
            kept += tokens * heads * 4
        kept += tokens * (part.q_rank + part.kv_rank) * _BF16
        if not runtime.fused_attention and not again:
            pairs = place.micro_batch * place.seq_length**2 / place.cp
            kept += pairs * heads * (5 if runtime.dropout else 2)
    elif isinstance(part, Recurrent):
        kept += tokens * (part.inner * 3 + part.conv_channels * 2) * _BF16 / tp
    elif isinstance(part, MLPShape):
        kept += _kept_inner(part, tokens / tp, inner)
    elif isinstance(part, ExpertsShape):
        rows = tokens / tp * part.top_k * place.etp * runtime.imbalance
        kept += rows * part.inputs(hidden) * byte + _kept_inner(
            part.expert, rows / place.etp, inner
        )
        if part.shared is not None:
            kept += _kept_inner(part.shared, tokens / tp, inner)
    return kept


def _kept_inner(part: MLPShape, tokens: float, after: float) -> float:
    wide = (2 if part.gated else 1) * _BF16 + after  # before and after the activation
    return tokens * part.width * wide
