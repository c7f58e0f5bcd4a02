"""A micro-batch in several parts that go through the layers side by side.

T tokens, H hidden, N documents.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mcore_models.common.batch import TokenBatch
from mcore_models.common.context import TokenContext


def split_lanes(context: TokenContext, lanes: int) -> list[tuple[TokenContext, slice]]:
    """Cut what layers may ask into that many parts of whole documents, and say which tokens.

    As many documents in each as in the others, or one less; a part may be empty. Reads
    `cu_seqlens` from the device unless the documents are `uniform`.
    """
    batch = context.batch
    if batch.rows is None:  # the places of tokens are their numbers, in the whole
        rows = torch.arange(batch.num_tokens, device=batch.tokens.device)
        batch = replace(batch, rows=rows)
    if batch.uniform is not None:
        count, length = batch.uniform
        bounds = [length * i for i in range(count + 1)]
    else:
        bounds = batch.cu_seqlens.tolist()
        count = len(bounds) - 1
    cuts = [count * lane // lanes for lane in range(lanes + 1)]
    parts = []
    for first, last in pairwise(cuts):
        # What lies past the last document goes with it.
        stop = batch.num_tokens if last == count else bounds[last]
        mine = slice(bounds[first] if first < count else batch.num_tokens, stop)
        part = _batch_of(batch, bounds[first : last + 1], mine)
        if batch.lengths is not None:
            part = replace(part, lengths=batch.lengths[first:last])
        parts.append((_context_of(context, part, mine), mine))
    return parts


def _batch_of(batch: TokenBatch, bounds: Sequence[int], rows: slice) -> TokenBatch:
    tensors: dict[str, Any] = {
        field.name: value[rows]
        for field in fields(batch)
        if field.name != "cu_seqlens" and isinstance(value := getattr(batch, field.name), Tensor)
    }
    first, count = bounds[0], len(bounds) - 1
    return replace(
        batch,
        **tensors,
        cu_seqlens=batch.cu_seqlens.new_tensor([bound - first for bound in bounds]),
        max_seqlen=max((b - a for a, b in pairwise(bounds)), default=0),
        uniform=None if batch.uniform is None else (count, batch.uniform[1]),
    )


def _context_of(context: TokenContext, batch: TokenBatch, rows: slice) -> TokenContext:
    dropout = context.dropout
    return replace(
        context,
        batch=batch,
        rotary=_angles_of(context.rotary, rows),
        rotary_local=_angles_of(context.rotary_local, rows),
        latent_rotary=_angles_of(context.latent_rotary, rows),
        dropout=None if dropout is None else replace(dropout, rows=dropout.rows[rows]),
        in_turns=True,
    )


def _angles_of(rotary: tuple[Tensor, Tensor] | None, rows: slice) -> tuple[Tensor, Tensor] | None:
    return None if rotary is None else (rotary[0][rows], rotary[1][rows])
