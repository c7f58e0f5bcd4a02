"""The time of one layer on one rank, operation by operation, and what it keeps for the backward.

Letters: T tokens of a micro-batch on the rank, h hidden size, s sequence length. Times are seconds,
memory is bytes, activations are bf16 unless said otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mcore_parallel.context.kinds import ContextKind
from mcore_parallel.cost.activations import kept_by_norm, kept_by_part
from mcore_parallel.cost.architecture import LayerShape
from mcore_parallel.cost.machines import Machine
from mcore_parallel.cost.parts import (
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    MambaShape,
    MLPShape,
    Part,
    Product,
    Recurrent,
)
from mcore_parallel.cost.place import Place
from mcore_parallel.cost.work import Workload

_BF16, _FP32 = 2.0, 4.0
LOGITS_BYTES = 2.0**30
"""Of how many bytes the head has logits at a time, unless a run says otherwise."""

_NAMES = {
    AttentionShape: "attention",
    MambaShape: "mamba",
    DeltaNetShape: "delta_net",
    MLPShape: "mlp",
    ExpertsShape: "moe",
}


class Times(NamedTuple):
    """Seconds by what they are spent on; the last three are communication that nothing hides."""

    products: float = 0.0
    attention: float = 0.0
    streaming: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        """All of them: they run one after another."""
        return sum(self)

    @property
    def computing(self) -> float:
        """Those in which no message is waited for."""
        return self.products + self.attention + self.streaming

    def plus(self, other: Times, factor: float = 1.0) -> Times:
        """Return the sum with `factor` times `other`."""
        return Times(*(a + factor * b for a, b in zip(self, other, strict=True)))


class Passes(NamedTuple):
    """A forward pass, and a backward pass in its two halves (`weight` is in no other)."""

    forward: Times = Times()
    backward: Times = Times()
    weight: Times = Times()

    def plus(self, other: Passes, factor: float = 1.0) -> Passes:
        """Return the sum with `factor` times `other`."""
        return Passes(*(a.plus(b, factor) for a, b in zip(self, other, strict=True)))

    @property
    def halves(self) -> tuple[float, float, float]:
        """Seconds of each."""
        return self.forward.total, self.backward.total, self.weight.total

    @property
    def total(self) -> Times:
        """All three."""
        return self.forward.plus(self.backward).plus(self.weight)


class _Rows(NamedTuple):
    """`copies` equal products over so many rows each, cut over so many ranks."""

    tokens: float
    ways: int
    copies: float = 1.0


class LayerCost(NamedTuple):
    """A layer's passes for one micro-batch. kept: bytes that a forward leaves for its backward.

    working: bytes in use on top while the layer is recomputed, or the head makes its loss.
    """

    passes: Passes
    kept: float
    working: float


def layer_cost(
    layer: LayerShape, hidden: int, place: Place, work: Workload, kind: ContextKind
) -> LayerCost:
    """Return what one layer takes on a rank that stands at `place`.

    kind: how its attention goes over the context axis.
    """
    passes, kept = Passes(), 0.0
    for part in layer.parts:
        part_passes = _around(hidden, part, place, work)
        for product in part.products(hidden):
            part_passes = part_passes.plus(_product(product, place, work))
        if isinstance(part, AttentionShape):
            part_passes = part_passes.plus(_attention(part, place, work, kind))
        elif isinstance(part, Recurrent):
            part_passes = part_passes.plus(_scan(part, place))
        elif isinstance(part, ExpertsShape):
            part_passes = part_passes.plus(_experts(part, hidden, place, work))
        if work.recomputes(_NAMES[type(part)]):
            part_passes = part_passes.plus(Passes(backward=part_passes.forward))
        else:
            kept += kept_by_part(part, hidden, place, work)
        passes = passes.plus(part_passes)
        kept += kept_by_norm(hidden, place, work)
    if any(isinstance(part, ExpertsShape) for part in layer.parts):
        passes = _slowed(passes, work.runtime.communication_share)
    if work.recompute == "full":
        again = passes.forward
        input_share = place.share * hidden * _BF16
        backward = passes.backward.plus(again)
        return LayerCost(passes._replace(backward=backward), input_share, kept)
    return LayerCost(passes, kept, 0.0)


def head_cost(
    vocab: int, hidden: int, place: Place, work: Workload, *, own_buffer: bool
) -> LayerCost:
    """Return what the head and the loss take: a bf16 product and three sweeps over the logits.

    Gradients are made in the forward pass, a chunk of logits at a time, and wait: that of the
    hidden states in bf16, that of the weight in fp32 unless it is added to what holds the
    gradients of the step all the time (own_buffer).
    """
    plain = work.precision.format == "bf16"
    bf16 = work if plain else Workload(batch=work.batch, seq_length=work.seq_length)
    passes = _product(Product(hidden, vocab, "column"), place, bf16)
    logits = place.tokens * vocab / place.tp * _BF16
    gather = _tensor_collective(hidden, place, work)
    forward = Times(streaming=place.machine.stream(2 * logits), tp=gather)
    backward = Times(streaming=place.machine.stream(2 * logits), tp=gather)
    passes = passes.plus(Passes(forward, backward))
    chunk = logits / max(1, math.ceil(logits / LOGITS_BYTES))
    states, weight = place.tokens * hidden, hidden * vocab / place.tp
    kept = place.share * hidden * _BF16 + states * _BF16  # what the norm was given; the gradient
    working = chunk + (states * _BF16 if place.sequence_parallel else 0.0)
    if not own_buffer:  # it is rounded when the backward pass comes
        kept, working = kept + weight * _FP32, max(working, weight * _BF16)
    return LayerCost(passes, kept, working)


def embedding_cost(hidden: int, place: Place, work: Workload) -> LayerCost:
    """Return what the lookup takes: a sweep over the hidden states, and their reduction over tp."""
    sweep = place.machine.stream(2 * place.tokens * hidden * _BF16)
    once = Times(streaming=sweep, tp=_tensor_collective(hidden, place, work))
    return LayerCost(Passes(once, once), 0.0, 0.0)


def _product(product: Product, place: Place, work: Workload, rows: _Rows | None = None) -> Passes:
    """The three products of a weight; by default over the rank's tokens, cut over tp.

    What is not cut has only the rank's own tokens before it under sequence parallelism.
    """
    inputs, outputs, cut = product
    tokens = place.share if cut == "whole" else place.tokens
    tokens, ways, count = rows or _Rows(tokens, place.tp)
    if cut == "column":
        outputs = max(1, outputs // ways)
    elif cut == "row":
        inputs = max(1, inputs // ways)
    machine, format = place.machine, work.precision.format
    forward = machine.product(tokens, inputs, outputs, format)
    backward = machine.product(tokens, outputs, inputs, format)
    weight = machine.product(inputs, tokens, outputs, format)
    cast = 0.0
    if format == "fp8":  # read as bf16, written as fp8 in both orders: input, and later gradient
        cast = machine.stream(count * tokens * inputs * (_BF16 + 2))
    gradient = 0.0 if not cast else machine.stream(count * tokens * outputs * (_BF16 + 2))
    return Passes(
        Times(products=count * forward, streaming=cast),
        Times(products=count * backward, streaming=gradient),
        Times(products=count * weight),
    )


def _slowed(passes: Passes, taken: float) -> Passes:
    """The same while communication takes a share of the processors."""
    left = 1 - taken
    return Passes(
        *(
            times._replace(
                products=times.products / left,
                attention=times.attention / left,
                streaming=times.streaming / left,
            )
            for times in passes
        )
    )


def _around(hidden: int, part: Part, place: Place, work: Workload) -> Passes:
    """The norm before a part, its residual sum, its activation, its tensor parallel collectives."""
    machine = place.machine
    # norm: read and write; residual: two read, one written
    swept = 5 * place.share * hidden * _BF16
    if work.runtime.dropout:
        swept += place.share * hidden * (_BF16 + 1)
    forward = machine.stream(swept) + 4 * machine.kernel
    backward = machine.stream(1.2 * swept) + 4 * machine.kernel
    mlp = part.shared if isinstance(part, ExpertsShape) else part
    if isinstance(mlp, MLPShape):
        inner = place.tokens * mlp.width / place.tp * _BF16
        reads = 2 if mlp.gated else 1
        forward += machine.stream((reads + 1) * inner)
        backward += machine.stream((2 * reads + 1) * inner)
    elif isinstance(part, AttentionShape):
        turned = place.tokens * part.num_heads * part.head_size * _BF16 / place.tp
        forward += machine.stream(2 * turned)
        backward += machine.stream(2 * turned)
    crosses = place.tp > 1 and not (isinstance(part, ExpertsShape) and part.shared is None)
    collective = _tensor_collective(hidden, place, work) if crosses else 0.0
    # With sequence parallelism a gather and a scatter, else one reduction. The backward gathers
    # the input again for the weight gradient, behind the input gradient's product.
    return Passes(
        Times(streaming=forward, tp=2 * collective),
        Times(streaming=backward, tp=2 * collective).plus(_again(hidden, part, place, work)),
    )


def _again(hidden: int, part: Part, place: Place, work: Workload) -> Times:
    """What cheap recomputation adds to the backward pass."""
    machine, again = place.machine, Times()
    if work.recomputes("norm"):
        again = again.plus(Times(streaming=machine.stream(2 * place.share * hidden * _BF16)))
    if work.recomputes("act"):
        if isinstance(part, ExpertsShape):
            rows = place.tokens / place.tp * part.top_k * place.etp * work.runtime.imbalance
            again = again.plus(_activation(part.expert, rows / place.etp, machine))
        mlp = part.shared if isinstance(part, ExpertsShape) else part
        if isinstance(mlp, MLPShape):
            again = again.plus(_activation(mlp, place.tokens / place.tp, machine))
    if work.recomputes("up") and isinstance(part, AttentionShape) and part.kv_rank:
        for product in part.products(hidden):
            if product.inputs in (part.q_rank, part.kv_rank):
                again = again.plus(_product(product, place, work).forward)
    return again


def _activation(part: MLPShape, tokens: float, machine: Machine) -> Times:
    reads = 2 if part.gated else 1
    return Times(streaming=machine.stream((reads + 1) * tokens * part.width * _BF16))


def _tensor_collective(hidden: int, place: Place, work: Workload) -> float:
    """A gather or scatter of hidden states over tp: half of a reduction."""
    size = place.tokens * hidden * _BF16
    return place.tp_link.all_gather(size) * (1 - work.runtime.tensor_overlap)


def _attention(part: AttentionShape, place: Place, work: Workload, kind: ContextKind) -> Passes:
    machine, runtime = place.machine, work.runtime
    s, heads = place.seq_length, part.num_heads / place.tp
    pairs = place.micro_batch * 2 * part.pairs(s) / place.cp  # masked ones included
    flops = pairs * part.core_flops / place.tp
    peak = machine.bf16.peak
    if runtime.fused_attention:
        length = s / (2 * place.cp) if place.cp > 1 else s
        rate = peak * machine.attention * length / (length + 2 * machine.half_size)
        core, back = flops / 2 / rate, flops / rate
    else:
        # Products with the head size as inner dimension, over all pairs; the scores are written,
        # scaled and masked, normalised, dropped, and read again.
        reached = part.head_size / (part.head_size + machine.half_size)
        rate = peak * machine.bf16.reached * reached
        swept = machine.stream(pairs * heads * (13 if runtime.dropout else 8))
        core = max(flops / rate, 0.0) + swept
        back = 2 * flops / rate + 1.2 * swept
    sent, returned = _context(part, core, back, place, kind)
    again = core if work.recomputes("core_attn") else 0.0
    return Passes(Times(attention=core, cp=sent), Times(attention=back + again, cp=returned))


def _context(
    part: AttentionShape, core: float, back: float, place: Place, kind: ContextKind
) -> tuple[float, float]:
    """Communication of attention over cp that nothing hides, forward and backward.

    A ring passes keys and values on behind the products of the block before; what does not fit is
    exposed. Gathers and exchanges come before the products and after them, and are exposed.
    """
    if place.cp == 1:
        return 0.0, 0.0
    link, byte = place.cp_link, _BF16
    keys = place.tokens * part.kv_width / min(place.tp, part.kv_heads) * byte
    inner = kind.exchanging(place.cp)
    forward = backward = 0.0
    if inner > 1:  # queries, keys and values out, outputs back; gradients the other way
        heads = part.num_heads / place.tp * (part.head_size + part.values)
        exchanged = link.all_to_all((place.tokens * heads * byte + keys) * inner / place.cp)
        forward, backward = exchanged, exchanged
    outer = place.cp // inner
    if outer == 1:
        return forward, backward
    passed = link.all_gather(keys * place.cp) * (outer - 1) / (place.cp - 1)
    if kind.name == "all-gather":
        return passed, 2 * passed
    hiding = (outer - 1) / outer  # the first block needs no message
    forward += max(0.0, passed - core * hiding) + link.latency
    backward += max(0.0, 2 * passed - back * hiding) + link.latency
    return forward, backward


def _scan(part: Recurrent, place: Place) -> Passes:
    """Convolution and scan: sweeps over the channels, states of a chunk staying on the chip."""
    moved = place.tokens * (4 * part.conv_channels + 6 * part.inner) * _BF16 / place.tp
    forward = place.machine.stream(moved) + 6 * place.machine.kernel
    return Passes(Times(streaming=forward), Times(streaming=2 * forward))


def _experts(part: ExpertsShape, hidden: int, place: Place, work: Workload) -> Passes:
    """Sorting, exchange and products of routed experts; every tp rank brings its own tokens."""
    machine, runtime = place.machine, work.runtime
    rows = place.tokens / place.tp * part.top_k * place.etp * runtime.imbalance
    held, width = part.num_experts / place.ep, part.inputs(hidden)
    passes = Passes()
    for product in part.expert.products(width):
        once = _product(product, place, work, _Rows(rows / held, place.etp, held))
        if runtime.grouped and held > 1:
            spared = Times(products=(held - 1) * machine.kernel)
            once = once.plus(Passes(spared, spared, spared), -1)
        passes = passes.plus(once)
    inner = rows * part.expert.width / place.etp * _BF16
    reads = 2 if part.expert.gated else 1
    # sorted and sorted back, sending and receiving: read and written each time
    sorting = machine.stream(8 * rows / place.etp * width * _BF16)
    forward = machine.stream((reads + 1) * inner) + sorting + 10 * machine.kernel
    backward = machine.stream((2 * reads + 1) * inner) + sorting + 10 * machine.kernel
    there, back = _exchange(part, width, place, work)
    comm = (there + back) * (1 - runtime.expert_overlap)
    return passes.plus(
        Passes(Times(streaming=forward, ep=comm), Times(streaming=backward, ep=comm))
    )


def _exchange(part: ExpertsShape, width: int, place: Place, work: Workload) -> tuple[float, float]:
    """Seconds to send tokens to their experts, and results back."""
    tokens = place.tokens / place.tp
    to_expert, from_expert = work.precision.dispatch, _BF16
    etp = place.etp_link.all_gather(tokens * part.top_k * place.etp * width)
    if place.ep == 1:
        return etp * to_expert, etp * from_expert
    if place.dispatcher == "all-gather":
        gathered = place.ep_link.all_gather(tokens * place.ep * place.etp * width)
        return gathered * to_expert, 2 * gathered * from_expert  # sums come back as fp32
    if work.runtime.dispatch == "all-to-all" or place.ep_link.inside:
        sent = tokens * part.top_k * width
        return (
            place.ep_link.all_to_all(sent * to_expert) + etp * to_expert,
            place.ep_link.all_to_all(sent * from_expert) + etp * from_expert,
        )
    nodes = place.ep_link.size / place.ep_link.per_node
    reached = nodes * (1 - (1 - 1 / nodes) ** part.top_k)
    if part.max_nodes is not None:
        reached = min(reached, part.max_nodes)
    away = reached * (1 - 1 / nodes)
    sent = tokens * width
    return (
        place.ep_link.all_to_all(sent * to_expert, nodes=away) + etp * to_expert,
        place.ep_link.all_to_all(sent * from_expert, nodes=away) + etp * from_expert,
    )
