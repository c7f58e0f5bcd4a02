"""Attention with a bias for each distance.

T tokens in N documents of at most L, Q heads with which this rank attends.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_models.common.builder import BuildContext
from mcore_models.common.text import Text
from mcore_models.config import ModelConfig
from mcore_models.parts import T5Config
from mcore_parallel import Init, ParamSpec, TensorLayout
from mcore_parallel.layout import Box
from mcore_parallel.spec import join


def distance_buckets(
    length: int, *, num_buckets: int, max_distance: int, causal: bool, device: torch.device
) -> Tensor:
    """The bucket of each pair of a query and a key, int64 [L, L] (Raffel et al., 2020, 2.1).

    Half of the buckets of a direction are for one distance each; the others divide what is left up
    to `max_distance` evenly by logarithm. Causal ones are for keys before the query alone; those
    after it are in bucket 0.
    """
    place = torch.arange(length, device=device)
    distance = place[None, :] - place[:, None]
    first = torch.zeros_like(distance)
    if causal:
        distance = (-distance).clamp(min=0)
    else:
        num_buckets //= 2
        first = (distance > 0).long() * num_buckets
        distance = distance.abs()
    single = num_buckets // 2
    far = torch.log(distance.clamp(min=1).float() / single) / math.log(max_distance / single)
    wide = (single + (far * (num_buckets - single)).long()).clamp(max=num_buckets - 1)
    return first + torch.where(distance < single, distance, wide)


def relative_bias(table: Tensor, length: int, options: T5Config, *, causal: bool) -> Tensor:
    """[Q, L, L]: what is added to the score of each query and key, -inf where it is hidden.

    `table` [buckets, Q] has the numbers of each bucket of distances.
    """
    buckets = distance_buckets(
        length,
        num_buckets=options.num_buckets,
        max_distance=options.max_distance,
        causal=causal,
        device=table.device,
    )
    bias = F.embedding(buckets, table).permute(2, 0, 1)
    if not causal:
        return bias
    return bias.masked_fill(torch.ones_like(buckets, dtype=torch.bool).triu(1), -math.inf)


class RelativeBias(nn.Module):
    """A learned number for each bucket of distances and head, cut over the heads."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        assert config.t5 is not None
        self._tp, self._heads = build.tp, config.num_heads
        self._init = Init(kind="normal", std=config.init_std)
        size = (config.t5.num_buckets, config.num_heads // build.tp.size)
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))

    def forward(self) -> Tensor:
        """The table [buckets, Q] of all heads here: every layer of the stack takes it."""
        return self.weight

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The spec of `weight`, global `<prefix>.weight` [buckets, Q of all ranks]."""
        rows, heads = self.weight.shape
        box = Box((0, heads * self._tp.rank), (rows, heads))
        layout = TensorLayout.box(join(prefix, "weight"), (rows, self._heads), box)
        return {"weight": ParamSpec(layout=layout, init=self._init)}


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, text: Text, scale: float
) -> Tensor:
    """Attention within each document, [T, Q, D] of q, k and v alike; `bias` [Q, L, L] is added.

    Documents are laid side by side in rows of the longest; memory N · Q · L². Rows past the last
    document give zeros.
    """
    if text.uniform is not None:
        samples, length = text.uniform
        rows = [x.view(samples, length, *x.shape[1:]) for x in (q, k, v)]
        return _dense(rows, bias[None], scale).reshape(q.shape)
    bounds = text.cu_seqlens.long()
    lengths = bounds.diff()
    index = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(bounds, index, right=True) - 1
    document = document.clamp(max=max(len(lengths) - 1, 0))
    inside = index < bounds[-1]
    place = (index - bounds[document]).masked_fill(~inside, 0)
    # One row more, at the end, for the tokens of no document.
    document = document.masked_fill(~inside, len(lengths))
    size = (len(lengths) + 1, text.max_seqlen)
    padded = [x.new_zeros(*size, *x.shape[1:]).index_put((document, place), x) for x in (q, k, v)]
    keys = torch.arange(text.max_seqlen, device=q.device)
    # A row without tokens sees its first key, a zero: a softmax over nothing is no number.
    hidden = keys >= F.pad(lengths, (0, 1)).clamp(min=1).unsqueeze(1)
    shown = bias[None].masked_fill(hidden[:, None, None, :], -math.inf)
    found = _dense(padded, shown, scale)[document, place]
    return found.masked_fill(~inside[:, None, None], 0.0)


def biased_decoding(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, new: Text, whole: Text, scale: float
) -> Tensor:
    """The same of the last tokens of each document, q [T, Q, D], and keys of all its tokens.

    `new` and `whole` are the documents of queries and of keys; `bias` is causal.
    """
    count, size = len(new.cu_seqlens) - 1, (new.max_seqlen, whole.max_seqlen)
    places = []
    for text in (new, whole):
        bounds = text.cu_seqlens.long()
        lengths = bounds.diff()
        document = torch.repeat_interleave(torch.arange(count, device=q.device), lengths)
        place = torch.arange(len(document), device=q.device) - bounds[document]
        places.append((document, place))
    rows = [
        x.new_zeros(count, length, *x.shape[1:]).index_put(at, x)
        for x, length, at in zip((q, k, v), (*size, size[1]), (*places, places[1]), strict=True)
    ]
    before = whole.cu_seqlens.diff() - new.cu_seqlens.diff()
    steps = torch.arange(size[0], device=q.device) + before.unsqueeze(1)
    shown = bias[:, steps.clamp(max=size[1] - 1)].transpose(0, 1)
    return _dense(rows, shown, scale)[places[0]]


def _dense(rows: list[Tensor], bias: Tensor, scale: float) -> Tensor:
    """[N, L, Q, D] of queries, keys and values alike."""
    q, k, v = (x.transpose(1, 2) for x in rows)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(1, 2)
