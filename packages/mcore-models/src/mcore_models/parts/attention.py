"""The configuration of attention beyond its numbers of heads."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from mcore_models._checks import check_choice, check_positive

QKNorm = Literal["head", "all", "l2"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What attention, pattern letter `*`, does besides scaled dot products of heads.

    `qk_norm` norms queries and keys before they are turned by their positions: "head" each head
    with the model's norm and weights that all heads share (Dehghani et al., 2023; Qwen3), "all" the
    heads of a token together by an RMS norm with a weight for every channel (OLMo 2), "l2" each
    head by its root mean square without weights (Llama 4). `output_bias` gives the output
    projection a bias; None is the model's `linear_bias`.

    Scores are multiplied by `scale`, None is head_dim^-½ (Gemma: query_pre_attn_scalar^-½), and
    with `softcap` c then become c · tanh(score / c). `sinks` are learned scores, one for each head,
    of a further key without a value (gpt-oss). `gate` multiplies the output, before its projection,
    by the sigmoid of a projection as wide as the queries' (Qwen3-Next).

    With `window` a token sees itself and the window - 1 tokens before it, in the layers
    `local_layers` (indices from 0; None is all layers). `local_rope_base` gives rotary positions of
    these layers, then unscaled, a base of their own (Gemma 3). The layers `nope_layers` have no
    rotary positions (Yang et al., 2025).

    Without `causal` a token sees those after it too, of a window as many as before it.

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    qk_norm: QKNorm | None = None
    output_bias: bool | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    gate: bool = False
    window: int | None = None
    local_layers: tuple[int, ...] | None = None
    local_rope_base: float | None = None
    nope_layers: tuple[int, ...] = ()
    causal: bool = True

    def __post_init__(self) -> None:
        if self.qk_norm is not None:
            check_choice("qk_norm", self.qk_norm, get_args(QKNorm))
        for name in ("scale", "softcap", "local_rope_base"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"attention.{name}={value} must be greater than 0 and finite")
        if self.window is not None:
            check_positive("attention.window", self.window)
        for name in ("local_layers", "nope_layers"):
            layers = getattr(self, name)
            if isinstance(layers, list):  # as it is read from a file
                object.__setattr__(self, name, layers := tuple(layers))
            if layers is not None and list(layers) != sorted({*layers}):
                raise ValueError(
                    f"attention.{name}={layers} must be indices of layers that rise: "
                    f"use {tuple(sorted({*layers}))}"
                )
        for name in ("local_layers", "local_rope_base"):
            if self.window is None and getattr(self, name) is not None:
                raise ValueError(
                    f"attention.{name} belongs to layers with a window, and there is none: give "
                    f"attention.window"
                )

    def check_layers(self, count: int) -> None:
        """Check that the layers named here are some of `count`; ValueError names the first."""
        for name in ("local_layers", "nope_layers"):
            for layer in getattr(self, name) or ():
                if not 0 <= layer < count:
                    raise ValueError(
                        f"attention.{name} names layer {layer} of num_layers={count}: "
                        f"use 0 to {count - 1}"
                    )

    def is_local(self, layer: int) -> bool:
        """Whether tokens of that layer see a window alone."""
        if self.window is None:
            return False
        return self.local_layers is None or layer in self.local_layers

    def window_of(self, layer: int) -> int | None:
        """How many tokens one of that layer sees, itself included; None is all before it."""
        return self.window if self.is_local(layer) else None
