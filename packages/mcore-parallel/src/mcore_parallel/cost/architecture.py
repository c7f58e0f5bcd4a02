"""The shape of a model as numbers: what planning needs, and nothing of how it is built.

One source of parameter and FLOP counts: planning, utilisation and documentation count with this.
A part of a layer (its mixer or its feed-forward) lists its matrix products with the way tensor
parallelism cuts them; `vectors` are its parameters that are in no product (biases, gains, taps).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

Cut: TypeAlias = Literal["column", "row", "whole"]


class Product(NamedTuple):
    """One weight matrix: `inputs` x `outputs`, and which of them tensor parallelism divides.

    "column" divides the outputs, "row" the inputs, "whole" is held and computed by every rank.
    """

    inputs: int
    outputs: int
    cut: Cut

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Attention with grouped or latent keys and values, causal or in both directions.

    head_size: of queries and keys; value_size: of values (None: the same). kv_rank > 0 is latent
    attention (DeepSeek-AI 2024): keys and values come from kv_rank numbers of a token and
    rope_size rotary channels that all heads share; queries from q_rank numbers (0: directly).
    gate: a projection as wide as the output multiplies it. window: how many tokens one sees, itself
    included (None: all before it); without `causal` those after it likewise.
    """

    num_heads: int
    kv_heads: int
    head_size: int
    value_size: int | None = None
    q_rank: int = 0
    kv_rank: int = 0
    rope_size: int = 0
    gate: bool = False
    window: int | None = None
    causal: bool = True
    vectors: int = 0

    @property
    def values(self) -> int:
        """Width of one head's values."""
        return self.head_size if self.value_size is None else self.value_size

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Return the weight matrices."""
        queries, out = self.num_heads * self.head_size, self.num_heads * self.values
        if not self.kv_rank:
            keys = self.kv_heads * (self.head_size + self.values)
            rows = queries + keys + out * self.gate
            return Product(hidden, rows, "column"), Product(out, hidden, "row")
        plain = self.num_heads * (self.head_size - self.rope_size + self.values)
        q = (
            (Product(hidden, self.q_rank, "whole"), Product(self.q_rank, queries, "column"))
            if self.q_rank
            else (Product(hidden, queries, "column"),)
        )
        return (
            *q,
            Product(hidden, self.kv_rank + self.rope_size, "whole"),
            Product(self.kv_rank, plain, "column"),
            Product(out, hidden, "row"),
        )

    @property
    def kv_width(self) -> int:
        """Channels of keys and values of one token that context parallelism passes on."""
        heads = self.num_heads if self.kv_rank else self.kv_heads
        return heads * (self.head_size + self.values)

    @property
    def core_flops(self) -> int:
        """Forward FLOPs of scores and mixing for one pair of tokens, all heads."""
        return 2 * self.num_heads * (self.head_size + self.values)

    def pairs(self, length: float) -> float:
        """Return the pairs of a query and a key that it sees in a document; its own counts half."""
        return visible_pairs(length, self.window) * self.directions

    @property
    def directions(self) -> int:
        """In how many directions a token sees: 1 or 2."""
        return 1 if self.causal else 2


def visible_pairs(length: float, window: int | None) -> float:
    """Return the pairs of tokens of a causal document, all or within a window, own ones half."""
    width = length if window is None else min(length, window)
    return width * length - width * width / 2


@dataclass(frozen=True, kw_only=True)
class MambaShape:
    """A Mamba-2 mixer: heads x head_size channels with state_size states each."""

    num_heads: int
    head_size: int
    state_size: int
    num_groups: int
    conv_width: int
    vectors: int = 0

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_size

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_size

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Return the weight matrices."""
        rows = self.inner + self.conv_channels + self.num_heads
        return Product(hidden, rows, "column"), Product(self.inner, hidden, "row")

    @property
    def scan_flops(self) -> int:
        """Forward FLOPs of one token outside matrix products.

        3 for each number of the states to update it (decay, product, sum), 2 to read it, and 2 for
        each tap and channel of the convolution. How a scan in chunks does it is not counted.
        """
        return 5 * self.inner * self.state_size + 2 * self.conv_width * self.conv_channels


@dataclass(frozen=True, kw_only=True)
class DeltaNetShape:
    """A gated delta net: num_heads heads with states of key_size x head_size, conv taps before."""

    num_heads: int
    key_heads: int
    key_size: int
    head_size: int
    conv_width: int
    vectors: int = 0

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_size

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return self.inner + 2 * self.key_heads * self.key_size

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Return the weight matrices."""
        rows = self.inner + self.conv_channels + 2 * self.num_heads
        return Product(hidden, rows, "column"), Product(self.inner, hidden, "row")

    @property
    def scan_flops(self) -> int:
        """Forward FLOPs of one token outside matrix products.

        For each number of the states 1 to decay it, 2 to read what it says of the key, 2 to correct
        that and 2 to read it; 2 for each tap and channel of the convolution. How a recurrence in
        chunks does it is not counted.
        """
        return 7 * self.inner * self.key_size + 2 * self.conv_width * self.conv_channels


Recurrent: TypeAlias = MambaShape | DeltaNetShape
"""A mixer that keeps states of one size, however many tokens there were."""


@dataclass(frozen=True, kw_only=True)
class MLPShape:
    """A feed-forward of inner width `width`; gated ones (SwiGLU) have two input matrices."""

    width: int
    gated: bool = True
    vectors: int = 0

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Return the weight matrices."""
        wide = self.width * (2 if self.gated else 1)
        return Product(hidden, wide, "column"), Product(self.width, hidden, "row")


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """A mixture of experts; `expert` is one of them, `shared` sees every token.

    latent: experts work at this width, between two projections (0: at the hidden size).
    shared_gate: one number of each token weighs what `shared` says. max_nodes: the router sends a
    token to at most so many nodes (None: to any). vectors: outside the experts, such as biases of
    the router.
    """

    num_experts: int
    top_k: int
    expert: MLPShape
    shared: MLPShape | None = None
    shared_gate: bool = False
    latent: int = 0
    max_nodes: int | None = None
    vectors: int = 0

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Return the weight matrices outside the routed experts."""
        found = [Product(hidden, self.num_experts, "whole")]
        if self.shared_gate:
            found.append(Product(hidden, 1, "whole"))
        if self.latent:
            found.append(Product(hidden, self.latent, "whole"))
            found.append(Product(self.latent, hidden, "whole"))
        shared = () if self.shared is None else self.shared.products(hidden)
        return (*found, *shared)

    def inputs(self, hidden: int) -> int:
        """Return the width of what a routed expert takes and gives."""
        return self.latent or hidden

    def routed(self, hidden: int) -> int:
        """Return the elements of one routed expert's matrices."""
        return sum(product.size for product in self.expert.products(self.inputs(hidden)))


Part: TypeAlias = AttentionShape | Recurrent | MLPShape | ExpertsShape
"""A mixer or a feed-forward."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The parts of a layer, one after another, usually a mixer and a feed-forward.

    vectors: of its norms.
    """

    parts: tuple[Part, ...]
    vectors: int = 0


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters by what happens to them.

    dense: of matrix products that every token passes. vectors: in no product. routed: of experts'
    products. routed_vectors: biases of experts. active: share of the routed ones that a token uses.
    """

    dense: int = 0
    vectors: int = 0
    routed: int = 0
    routed_vectors: int = 0
    active: int = 0
    active_vectors: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            dense=self.dense + other.dense,
            vectors=self.vectors + other.vectors,
            routed=self.routed + other.routed,
            routed_vectors=self.routed_vectors + other.routed_vectors,
            active=self.active + other.active,
            active_vectors=self.active_vectors + other.active_vectors,
        )

    def times(self, count: int) -> Counts:
        """Return the counts of `count` such layers."""
        return Counts(**{name: value * count for name, value in vars(self).items()})

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.vectors + self.routed + self.routed_vectors


def count_layer(layer: LayerShape, hidden: int) -> Counts:
    """Return the parameters of one layer."""
    dense, vectors = 0, layer.vectors
    routed = Counts()
    for part in layer.parts:
        dense += sum(product.size for product in part.products(hidden))
        vectors += part.vectors
        if isinstance(part, ExpertsShape):
            vectors += part.shared.vectors if part.shared else 0
            size, biases = part.routed(hidden), part.expert.vectors
            routed = Counts(
                routed=part.num_experts * size,
                routed_vectors=part.num_experts * biases,
                active=part.top_k * size,
                active_vectors=part.top_k * biases,
            )
    return Counts(dense=dense, vectors=vectors) + routed


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder: embedding, layers, final norm, head.

    positions: rows of learned tables beside that of tokens, such as positions. vectors: in no
    product of every token, such as the final norm. has_head: whether there is one at all;
    head_layer: a product hidden x hidden stands before it (BERT). predictions: modules that predict
    one token further each (multi-token prediction, DeepSeek-AI 2024): a layer such as the last, a
    product 2 · hidden x hidden with three norms before it, and the head once more; `parameters`
    leaves them out, as published sizes do, `flops_per_token` counts them.
    kinds: the different layers and how many there are of each; members: which of them each one is.
    """

    hidden_size: int
    vocab_size: int
    layers: tuple[LayerShape, ...]
    tied_embeddings: bool = False
    positions: int = 0
    vectors: int = 0
    has_head: bool = True
    head_layer: bool = False
    predictions: int = 0
    kinds: tuple[tuple[LayerShape, int], ...] = field(init=False, repr=False, compare=False)
    members: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.layers:
            raise ValueError("a model's shape needs at least 1 layer")
        counted = Counter(self.layers)
        numbers = {layer: number for number, layer in enumerate(counted)}
        object.__setattr__(self, "kinds", tuple(counted.items()))
        object.__setattr__(self, "members", tuple(numbers[layer] for layer in self.layers))

    @property
    def embedding(self) -> int:
        """Elements of the token and position tables."""
        return (self.vocab_size + self.positions) * self.hidden_size

    @property
    def head(self) -> int:
        """Elements of the head's matrix, also where it is the embedding's; 0 without a head."""
        return self.vocab_size * self.hidden_size * self.has_head

    @property
    def before_head(self) -> int:
        """Elements of the matrix of `head_layer`, 0 without."""
        return self.hidden_size**2 * self.head_layer

    @cached_property
    def in_layers(self) -> Counts:
        """The parameters of all layers, those of further predictions left out."""
        counts = (count_layer(layer, self.hidden_size).times(n) for layer, n in self.kinds)
        return sum(counts, Counts())

    @property
    def parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        head = 0 if self.tied_embeddings else self.head
        return self.in_layers.total + self.embedding + head + self.before_head + self.vectors

    @property
    def active_parameters(self) -> int:
        """Those that one token uses: the experts that it does not choose are left out."""
        layers = self.in_layers
        idle = layers.routed + layers.routed_vectors - layers.active - layers.active_vectors
        return self.parameters - idle

    @property
    def matmul_parameters(self) -> int:
        """Weights of matrix products, the head included also when it is tied."""
        layers = self.in_layers
        return layers.dense + layers.routed + self.before_head + self.head

    @property
    def active_matmul_parameters(self) -> int:
        """Weights of the matrix products that one token passes, the head once."""
        layers = self.in_layers
        return layers.dense + layers.active + self.before_head + self.head

    @cached_property
    def flops_of_any_token(self) -> float:
        """The training FLOPs of a token that depend on no other token.

        6 for each active weight of a matrix product (2 forward, 4 backward); three times the
        forward scan of recurrent layers. Nothing that is computed twice counts.
        """
        further = 0
        if self.predictions:
            last = count_layer(self.layers[-1], self.hidden_size)
            further = last.dense + last.active + 2 * self.hidden_size**2 + self.head
        scans = sum(
            n * part.scan_flops
            for layer, n in self.kinds
            for part in layer.parts
            if isinstance(part, Recurrent)
        )
        return 6.0 * (self.active_matmul_parameters + self.predictions * further) + 3.0 * scans

    @cached_property
    def _cores(self) -> Mapping[int | None, int]:
        """The forward FLOPs for one pair of tokens in all attention layers, by their window."""
        cores: Counter[int | None] = Counter()
        for layer in (*self.layers, *[self.layers[-1]] * self.predictions):
            for part in layer.parts:
                if isinstance(part, AttentionShape):
                    cores[part.window] += part.core_flops * part.directions
        return cores

    def attention_flops(self, length: int) -> float:
        """Return the training FLOPs of attention over a document of that length.

        A causal query sees half of its document on average, or what its window shows; scores and
        mixing, forward and twice that backward. For equal head sizes and no window
        6 · heads · head size · length² for each layer.
        """
        return sum(3.0 * core * visible_pairs(length, w) for w, core in self._cores.items())

    def flops_per_token(self, seq_length: int) -> float:
        """Return the FLOPs of a training step per token of documents of `seq_length`."""
        return self.flops_of_any_token + self.attention_flops(seq_length) / max(seq_length, 1)

    def flops_of_documents(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of a training step over packed documents of these lengths."""
        attention = sum(self.attention_flops(n) * k for n, k in Counter(lengths).items())
        return self.flops_of_any_token * sum(lengths) + attention
