"""The shape of a model as numbers: what planning needs, and nothing of how it is built.

One source of parameter and FLOP counts: planning, utilisation and documentation count with this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mcore_parallel.cost.parts import (
    AttentionShape,
    ExpertsShape,
    Part,
    Recurrent,
    visible_pairs,
)


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
