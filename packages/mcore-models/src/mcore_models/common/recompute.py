"""Which activations a model computes again in the backward pass instead of keeping them.

A choice of how to train, like a layout: it changes no architecture and not a bit of any result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor

from mcore_models._checks import check_choice
from mcore_models.config import ModelConfig
from mcore_parallel import AttentionOp, ParallelConfig
from mcore_parallel.recompute import recompute

RecomputeMode = Literal["none", "full", "selective"]
_LETTERS = {
    **{"core_attn": "*+", "mlp": "-", "moe": "E"},
    **{"mamba": "M", "delta_net": "G", "latent_up": "+"},
}
PARTS = (*_LETTERS, "norm")
"""What can be recomputed by itself."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What is kept of a forward pass (Korthikanti et al., arXiv:2205.05198).

    mode: "full" keeps the input of layers and runs them again; "selective" runs only `parts` again.
    first_layers: of full: how many layers of each pipeline stage (of each chunk of it) are
    recomputed, the first ones; None is all. layers_together: of full: layers for which only the
    input of the first is kept; they are recomputed together. spread: of full: under tensor without
    sequence parallelism, where ranks hold equal inputs, each keeps a share of these; costs an
    all-gather of hidden states for each recomputation. parts: of selective: "core_attn" (attention
    between its projections), "latent_up" (latent attention from what tokens are pressed into to its
    output projection), "mlp", "moe", "mamba", "delta_net" (whole), "norm" (the norm of each of
    these, whose output is then not kept).
    """

    mode: RecomputeMode = "none"
    first_layers: int | None = None
    layers_together: int = 1
    spread: bool = False
    parts: tuple[str, ...] = ("core_attn",)

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(RecomputeMode))
        default = {"first_layers": None, "layers_together": 1, "spread": False}
        for name, value in default.items():
            if self.mode != "full" and getattr(self, name) != value:
                raise ValueError(
                    f"{name}={getattr(self, name)} belongs to mode full, not {self.mode}"
                )
        if self.mode != "selective" and self.parts != ("core_attn",):
            raise ValueError(f"parts {list(self.parts)} belong to mode selective, not {self.mode}")
        for name in ("first_layers", "layers_together"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts or len(set(self.parts)) < len(self.parts):
            raise ValueError(
                f"parts {list(self.parts)} must be some of {', '.join(PARTS)}, each once"
            )

    def recomputes(self, part: str) -> bool:
        """Whether that part is recomputed by itself."""
        return self.mode == "selective" and part in self.parts

    def groups(self, layers: list[str]) -> list[tuple[bool, list[str]]]:
        """Cut the layers of a chunk into those that run as one: (whether recomputed, layers)."""
        if self.mode != "full":
            return [(False, layers)]
        count = len(layers) if self.first_layers is None else self.first_layers
        first, rest = layers[:count], layers[count:]
        size = self.layers_together
        groups = [(True, first[i : i + size]) for i in range(0, len(first), size)]
        return [*groups, (False, rest)]

    def check(self, config: ModelConfig, parallel: ParallelConfig) -> None:
        """Check that a model of that architecture, cut in that way, has what is asked for.

        Raises:
            ValueError: one line with the numbers, or with the parts that there are.
        """
        if self.mode == "selective":
            letters = set("".join(config.layer_pattern))
            there = [part for part, of in _LETTERS.items() if letters & {*of}]
            if config.norm_place in ("pre", "both"):  # only those before parts
                there.append("norm")
            missing = [part for part in self.parts if part not in there]
            if missing:
                raise ValueError(
                    f"recompute.parts: this model has no {missing[0]!r}; it has {', '.join(there)}"
                )
        if self.mode != "full":
            return
        if self.spread and (parallel.tp == 1 or parallel.sequence_parallel):
            why = "sequence parallelism spreads them already" if parallel.tp > 1 else "tp=1"
            raise ValueError(
                f"recompute.spread keeps inputs of layers once over the tensor-parallel ranks: "
                f"{why}; use spread=false"
            )
        most = max(map(len, parallel.place_layers(config.total_layers)))
        for name in ("first_layers", "layers_together"):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(
                    f"recompute.{name}={value}, and no pipeline stage (or chunk of one) has more "
                    f"than {most} of the {config.total_layers} layers: use {most} or less"
                )


def recomputed_attention(attention: AttentionOp) -> AttentionOp:
    """The same operator, of which only q, k, v and the output are kept for the backward pass."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        fn: Callable[..., tuple[Tensor, Tensor]] = partial(attention, **options)
        return recompute(fn, q, k, v)

    return call
