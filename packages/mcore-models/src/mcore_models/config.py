"""The architecture of a decoder, as one checked value.

Architecture only: nothing about meshes, precision or kernels. Whatever is `None` follows from the
other fields; the properties `kv_heads`, `head_size`, `mlp_size` and `layer_pattern` give the value
in force.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mcore_models._checks import check_choice, check_positive
from mcore_models._consistency import check_heads, check_options
from mcore_models._families import check_family
from mcore_models.parts import (
    AttentionConfig,
    BertConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    MambaConfig,
    MoEConfig,
    MTPConfig,
    RopeConfig,
    T5Config,
)
from mcore_models.pattern import NO_PART, parse_pattern

NormKind = Literal["rms_norm", "layer_norm"]
NormPlace = Literal["pre", "post", "both", "sum"]
ResidualKind = Literal["sequential", "parallel", "parallel_shared"]
ActivationKind = Literal[
    "swiglu",
    "geglu",
    "geglu_tanh",
    "quick_geglu",
    "gelu",
    "gelu_tanh",
    "relu",
    "squared_relu",
    "silu",
]
PositionKind = Literal["rope", "learned", "none"]

GATES: Mapping[str, str] = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "quick_geglu": "quick_gelu",
}
"""Gated activations, by the function of the gate, as `mcore_kernels` calls it."""

PART_CONFIGS: Mapping[str, tuple[str, type[Any]]] = {
    "E": ("moe", MoEConfig),
    "M": ("mamba", MambaConfig),
    "G": ("delta_net", DeltaNetConfig),
    "+": ("latent", LatentAttentionConfig),
}
"""Letters whose part has a configuration of its own: the field that holds it, and its type."""

_OPTIONS: Mapping[str, type[Any]] = {
    "attention": AttentionConfig,
    "rope": RopeConfig,
    "mtp": MTPConfig,
    "bert": BertConfig,
    "t5": T5Config,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A language model, most often a decoder: what is computed, not where or how fast.

    `pattern` has one entry per layer: two letters, the mixer and the feed-forward, each a residual
    step behind its own norm. `*` is attention, `+` the latent attention that `latent`
    describes, `M` the Mamba-2 mixer that `mamba` describes, `G` the
    gated delta net that `delta_net` describes, `-`
    the MLP, `E` the mixture of experts that `moe` describes, `.` is nothing; every other letter is
    looked up among the builders given to `build_model`. `None` means `*-` everywhere, or `M.` where
    there is a `mamba` and no attention head; with a `moe` the second letter is `E`. Pairs such as
    `("*", "-")` and one string with blanks, `"*- M. X-"`, are taken too, and so is a string without
    blanks that has a letter for each of several layers, `"M*-E"`: a mixer or a feed-forward alone.

    A model without attention has no heads: `num_heads` is then 0, and `position` "rope" means
    nothing.

    `norm_place` puts norms before each mixer and feed-forward ("pre"), after it, before its output
    is added ("post", OLMo 2), or in both places ("both", Gemma 2); there is one after the last
    layer always. Or it norms the sum ("sum", Vaswani et al., 2017; BERT), and there is none after
    the last layer. `zero_centered_norm` multiplies by 1 + weight, and `norm_bias` gives layer norms
    a bias. `residual` "parallel" gives the feed-forward of a layer the same input as its mixer
    (GPT-NeoX), "parallel_shared" with one norm for both (GPT-J).

    `linear_bias` gives linear layers biases, `attention_bias` those of queries, keys and values,
    and `mlp_bias`, unless it is None, says so of the MLP. Of gated activations `glu_limit` clamps
    the gate from above and the other factor from both sides, to which `glu_offset` is added
    (gpt-oss).

    Embeddings are multiplied by `embedding_scale`, rounded to their dtype as Gemma's is, outputs of
    mixers and feed-forwards by `residual_scale` before they are added, and logits by `logit_scale`;
    with `logit_softcap` c they then become c · tanh(logit / c).

    `bert` makes an encoder of it, with heads for masked tokens and pairs of segments, and `t5` an
    encoder with a decoder that reads it (`family`).

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
    norm_place: NormPlace = "pre"
    norm_bias: bool = True
    zero_centered_norm: bool = False
    residual: ResidualKind = "sequential"
    activation: ActivationKind = "swiglu"
    glu_limit: float | None = None
    glu_offset: float = 0.0
    position: PositionKind = "rope"
    rope_base: float = 10000.0
    linear_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool | None = None
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    init_std: float = 0.02
    init_depth_scaled: bool = True
    dropout: float = 0.0
    pattern: tuple[str, ...] | None = None
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    moe: MoEConfig | None = None
    mamba: MambaConfig | None = None
    delta_net: DeltaNetConfig | None = None
    latent: LatentAttentionConfig | None = None
    mtp: MTPConfig | None = None
    bert: BertConfig | None = None
    t5: T5Config | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_positions"):
            check_positive(name, getattr(self, name))
        if self.num_heads != 0:
            check_positive("num_heads", self.num_heads)
        for name in ("num_kv_heads", "head_dim", "ffn_size"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name, kind in _CHOICES.items():
            check_choice(name, getattr(self, name), get_args(kind))
        for name, options in _OPTIONS.items():
            if isinstance(getattr(self, name), Mapping):  # as it is read from a file
                object.__setattr__(self, name, options(**getattr(self, name)))
        self._check_scalars()
        if self.pattern is not None:
            object.__setattr__(self, "pattern", parse_pattern(self.pattern, self.num_layers))
        self._check_part_configs()
        check_heads(self)
        check_options(self)
        check_family(self)

    @property
    def family(self) -> str:
        """What `build_model` makes: "gpt", a decoder, "bert", an encoder, or "t5", both."""
        return next((x for x in ("bert", "t5") if getattr(self, x) is not None), "gpt")

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
    def rotary_size(self) -> int:
        """How many channels of a head turn with its position: `rope.rotary_dim`, or all."""
        return self.head_size if self.rope.rotary_dim is None else self.rope.rotary_dim

    @property
    def mlp_size(self) -> int:
        """Inner width of the MLP: `ffn_size`; else 4·hidden, if gated 8/3·hidden up to 64s."""
        if self.ffn_size is not None:
            return self.ffn_size
        if self.gated:
            return math.ceil(8 * self.hidden_size / (3 * 64)) * 64
        return 4 * self.hidden_size

    @property
    def gated(self) -> bool:
        """Whether the activation multiplies two projections."""
        return self.activation in GATES

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.linear_bias or self.attention_bias

    @property
    def output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        given = self.attention.output_bias
        return self.linear_bias if given is None else given

    @property
    def ffn_bias(self) -> bool:
        """Whether the projections of the MLP have a bias."""
        return self.linear_bias if self.mlp_bias is None else self.mlp_bias

    @property
    def expert_bias(self) -> bool:
        """Whether the projections of experts have a bias."""
        given = None if self.moe is None else self.moe.expert_bias
        return self.ffn_bias if given is None else given

    @property
    def layer_pattern(self) -> tuple[str, ...]:
        """The two letters of every layer, `num_layers` entries."""
        if self.pattern is not None:
            return self.pattern
        mixer = "*"
        if not self.num_heads and self.latent is not None:
            mixer = "+"
        elif not self.num_heads and self.mamba is not None:
            mixer = "M"
        elif not self.num_heads and self.delta_net is not None:
            mixer = "G"
        dense = NO_PART if mixer == "M" else "-"
        return (mixer + (dense if self.moe is None else "E"),) * self.num_layers

    @property
    def total_layers(self) -> int:
        """Layers of all stacks: `num_layers`, and after these those of the decoder of `t5`."""
        if self.t5 is None:
            return self.num_layers
        return self.num_layers + (self.t5.num_decoder_layers or self.num_layers)

    def layers_with(self, letter: str) -> tuple[int, ...]:
        """The indices of the layers that have a part of this letter, those of `mtp` at the end."""
        pattern = (*self.layer_pattern, *self.mtp_pattern)
        return tuple(i for i, letters in enumerate(pattern) if letter in letters)

    @property
    def mtp_pattern(self) -> tuple[str, ...]:
        """The two letters of the layer of each depth of `mtp`; empty without."""
        return () if self.mtp is None else self.layer_pattern[-1:] * self.mtp.num_depths

    @property
    def embeds_at_end(self) -> bool:
        """Whether the last pipeline stage needs the token embedding: for the head, or for `mtp`."""
        return self.tied_embeddings or self.mtp is not None

    @property
    def output_init_std(self) -> float:
        """Standard deviation for `attention.o`, `mamba.out`, `delta_net.out` and `mlp.down`.

        `init_std / sqrt(2 · num_layers)` when `init_depth_scaled` (GPT-2: the residual stream then
        has the same variance at any depth), else `init_std`.
        """
        return self.init_std / math.sqrt(2 * self.num_layers if self.init_depth_scaled else 1)

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
        if self.latent is not None and self.position == "rope":
            self.latent.check_rope(self.rope)

    def _check_scalars(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is a probability: use 0 <= dropout < 1")
        scales = ("embedding_scale", "residual_scale", "logit_scale")
        for name in ("norm_eps", "init_std", "rope_base", *scales):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0 and finite")
        for name in ("glu_limit", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be greater than 0 and finite")


_CHOICES = {
    "norm": NormKind,
    "norm_place": NormPlace,
    "residual": ResidualKind,
    "activation": ActivationKind,
    "position": PositionKind,
}
