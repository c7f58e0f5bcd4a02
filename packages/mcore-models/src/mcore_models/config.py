"""The architecture of a decoder, as one checked value.

Architecture only: nothing about meshes, precision or kernels. Whatever is `None` follows from the
other fields; the properties `kv_heads`, `head_size`, `mlp_size` and `layer_pattern` give the value
in force.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mcore_models._checks import (
    check_choice,
    check_positive,
    nearest_divisors,
    nearest_multiples,
)
from mcore_models.part_configs import MambaConfig, MoEConfig

NormKind = Literal["rms_norm", "layer_norm"]
ActivationKind = Literal["swiglu", "gelu", "gelu_tanh"]
PositionKind = Literal["rope", "learned", "none"]

NO_PART = "."
"""The letter of a pattern entry that says: this layer has no mixer (or no feed-forward)."""

PART_CONFIGS: Mapping[str, tuple[str, type[Any]]] = {
    "E": ("moe", MoEConfig),
    "M": ("mamba", MambaConfig),
}
"""Letters whose part has a configuration of its own: the field that holds it, and its type."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only language model: what is computed, not where or how fast.

    `pattern` has one entry per layer: two letters, the mixer and the feed-forward, each a residual
    step behind its own norm. `*` is attention, `M` the Mamba-2 mixer that `mamba` describes, `-`
    the MLP, `E` the mixture of experts that `moe` describes, `.` is nothing; every other letter is
    looked up among the builders given to `build_model`. `None` means `*-` everywhere, or `M.` where
    there is a `mamba` and no attention head; with a `moe` the second letter is `E`. Pairs such as
    `("*", "-")` and one string with blanks, `"*- M. X-"`, are taken too.

    A model without attention has no heads: `num_heads` is then 0, and `position` "rope" means
    nothing.

    `dropout` is the probability for the embedding and for the output of every mixer and
    feed-forward; attention probabilities are never dropped.

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int = 0
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_size: int | None = None
    max_positions: int = 2048
    norm: NormKind = "rms_norm"
    norm_eps: float = 1e-5
    activation: ActivationKind = "swiglu"
    position: PositionKind = "rope"
    rope_base: float = 10000.0
    linear_bias: bool = False
    attention_bias: bool = False
    tied_embeddings: bool = False
    init_std: float = 0.02
    init_depth_scaled: bool = True
    dropout: float = 0.0
    pattern: tuple[str, ...] | None = None
    moe: MoEConfig | None = None
    mamba: MambaConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_positions"):
            check_positive(name, getattr(self, name))
        if self.num_heads != 0:
            check_positive("num_heads", self.num_heads)
        for name in ("num_kv_heads", "head_dim", "ffn_size"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_choice("norm", self.norm, get_args(NormKind))
        check_choice("activation", self.activation, get_args(ActivationKind))
        check_choice("position", self.position, get_args(PositionKind))
        self._check_scalars()
        if self.pattern is not None:
            object.__setattr__(self, "pattern", _parse_pattern(self.pattern, self.num_layers))
        self._check_part_configs()
        self._check_heads()

    @property
    def kv_heads(self) -> int:
        """Key and value heads: `num_kv_heads`, or one per query head."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one head: `head_dim`, or `hidden_size / num_heads`; 0 without heads."""
        if self.head_dim is None:
            return self.hidden_size // self.num_heads if self.num_heads else 0
        return self.head_dim

    @property
    def mlp_size(self) -> int:
        """Inner width of the MLP: `ffn_size`; else 4·hidden, for SwiGLU 8/3·hidden up to 64s."""
        if self.ffn_size is not None:
            return self.ffn_size
        if self.activation == "swiglu":
            return math.ceil(8 * self.hidden_size / (3 * 64)) * 64
        return 4 * self.hidden_size

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.linear_bias or self.attention_bias

    @property
    def layer_pattern(self) -> tuple[str, ...]:
        """The two letters of every layer, `num_layers` entries."""
        if self.pattern is not None:
            return self.pattern
        mixer = "M" if self.mamba is not None and not self.num_heads else "*"
        dense = "-" if mixer == "*" else NO_PART
        return (mixer + (dense if self.moe is None else "E"),) * self.num_layers

    def layers_with(self, letter: str) -> tuple[int, ...]:
        """The indices of the layers that have a part of this letter."""
        return tuple(i for i, letters in enumerate(self.layer_pattern) if letter in letters)

    @property
    def output_init_std(self) -> float:
        """Standard deviation for `attention.o`, `mamba.out` and `mlp.down`.

        `init_std / sqrt(2 · num_layers)` when `init_depth_scaled` (GPT-2: the residual stream then
        has the same variance at any depth), else `init_std`.
        """
        return self.init_std / math.sqrt(2 * self.num_layers if self.init_depth_scaled else 1)

    def _check_heads(self) -> None:
        heads, kv_heads, hidden = self.num_heads, self.kv_heads, self.hidden_size
        if not heads:
            self._check_no_heads()
            return
        if heads % kv_heads:
            near = nearest_divisors(heads, kv_heads)
            raise ValueError(
                f"num_heads={heads} is not a multiple of num_kv_heads={kv_heads}: "
                f"use num_kv_heads {near}"
            )
        if self.head_dim is None and hidden % heads:
            near = nearest_multiples(hidden, heads)
            raise ValueError(
                f"hidden_size={hidden} is not a multiple of num_heads={heads}: "
                f"use hidden_size {near}, or give head_dim"
            )
        if self.position == "rope" and self.head_size % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels and head_dim={self.head_size} is odd: "
                f"use {nearest_multiples(self.head_size, 2)}"
            )

    def _check_no_heads(self) -> None:
        for index, letters in enumerate(self.layer_pattern):
            if "*" in letters:
                raise ValueError(
                    f"layer {index} asks for '*', attention, and num_heads is 0: give num_heads"
                )
        for name in ("num_kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} describes attention, of which num_heads=0 says "
                    f"that there is none: leave it out, or give num_heads"
                )

    def _check_part_configs(self) -> None:
        letters = "".join(self.layer_pattern)
        for letter, (name, kind) in PART_CONFIGS.items():
            value = getattr(self, name)
            if isinstance(value, Mapping):  # as it is read from a file
                value = kind(**value)
                object.__setattr__(self, name, value)
            if letter in letters and value is None:
                index = next(i for i, entry in enumerate(self.layer_pattern) if letter in entry)
                raise ValueError(
                    f"layer {index} asks for {letter!r} and {name} is not set: "
                    f"give {name}={kind.__name__}(…), or another letter"
                )
            if value is not None and letter not in letters:
                raise ValueError(
                    f"{name} is set and no layer of the pattern has {letter!r}: "
                    f"put {letter!r} into the pattern, or leave {name} out"
                )

    def _check_scalars(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is a probability: use 0 <= dropout < 1")
        for name in ("norm_eps", "init_std", "rope_base"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0")


def _parse_pattern(pattern: str | Sequence[str | Sequence[str]], layers: int) -> tuple[str, ...]:
    entries = pattern.split() if isinstance(pattern, str) else pattern
    parsed = tuple("".join(entry) for entry in entries)
    for index, entry in enumerate(parsed):
        if len(entry) != 2 or entry == NO_PART * 2 or any(c.isspace() for c in entry):
            raise ValueError(
                f"pattern entry {index} is {entry!r}: a layer is two letters, mixer and "
                f"feed-forward, such as '*-'; '{NO_PART}' stands for one that is absent"
            )
    if len(parsed) != layers:
        raise ValueError(
            f"pattern has {len(parsed)} entries for num_layers={layers}: "
            f"give {layers} entries or num_layers={len(parsed)}"
        )
    return parsed
