"""The parts of a layer as numbers: its mixer, its feed-forward.

Each lists its matrix products with the way tensor parallelism cuts them; `vectors` are its
parameters that are in no product (biases, gains, taps).
"""

from __future__ import annotations

from dataclasses import dataclass
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
