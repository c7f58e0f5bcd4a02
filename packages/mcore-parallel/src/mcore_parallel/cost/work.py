"""What a training step does, in which numbers, and what the software that runs it can overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Dispatch: TypeAlias = Literal["all-to-all", "by-node"]
RECOMPUTED = ("core_attn", "norm", "act", "up", "mlp", "moe", "mamba", "delta_net")
"""Parts that `Workload.recompute` can name."""

_FORMATS = ("bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The numbers of a step: `format` of matrix products, and bytes of one element of each state.

    optimizer: master weights and moments together. dispatch: of an activation on its way to an
    expert (on its way back it is bf16).
    """

    format: str = "bf16"
    parameter: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0
    dispatch: float = 2.0

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(f"precision {self.format!r}: known are {' and '.join(_FORMATS)}")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What the software does beside the layout.

    fused_attention: scores are never written out. dropout: masks are kept. tensor_overlap: share
    of tensor parallel collectives behind products. expert_overlap: share of the exchange with
    experts behind other work. dispatch: "by-node" sends a token once to every node that has
    experts of it, "all-to-all" once for every expert. grouped: all experts' products are one
    kernel. communication_share: of a GPU's processors, kept busy by overlapped communication with
    experts. scattered_messages: without sequence parallelism the tp ranks of a stage send a share
    of the hidden states each, and gather them where they arrive. imbalance: tokens of the busiest
    rank's experts over their mean.
    """

    fused_attention: bool = True
    dropout: bool = False
    tensor_overlap: float = 0.0
    expert_overlap: float = 0.0
    dispatch: Dispatch = "all-to-all"
    grouped: bool = True
    communication_share: float = 0.0
    scattered_messages: bool = False
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        for name in ("tensor_overlap", "expert_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is a share: use 0 to 1")
        if not 0 <= self.communication_share < 1:
            raise ValueError(
                f"communication_share={self.communication_share} leaves nothing: use 0 or more, "
                f"and less than 1"
            )
        if self.imbalance < 1:
            raise ValueError(f"imbalance={self.imbalance} is the most over the mean: use 1 or more")
        if self.dispatch not in get_args(Dispatch):
            raise ValueError(
                f"dispatch {self.dispatch!r}: known are {' and '.join(get_args(Dispatch))}"
            )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step: `batch` sequences of `seq_length` tokens, `micro_batch` at a time.

    recompute: what the backward pass computes again: "none", "full" (every layer from its input),
    or parts joined by "+": "core_attn" (attention between its projections), "norm" and "act"
    (outputs of norms and of activations), "up" (projections up from latent queries, keys and
    values), and whole "mlp", "moe", "mamba" and "delta_net".
    """

    batch: int
    seq_length: int
    micro_batch: int = 1
    recompute: str = "none"
    precision: Precision = Precision()
    runtime: Runtime = Runtime()

    def __post_init__(self) -> None:
        for name in ("batch", "seq_length", "micro_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        parts = self.recompute.split("+")
        if self.recompute not in ("none", "full"):
            unknown = [part for part in parts if part not in RECOMPUTED]
            if unknown or len(set(parts)) < len(parts):
                raise ValueError(
                    f"recompute {self.recompute!r}: use none, full, or some of "
                    f"{', '.join(RECOMPUTED)} joined by +, each once"
                )

    def recomputes(self, part: str) -> bool:
        """Return whether that part is computed again by itself."""
        return part in self.recompute.split("+")

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq_length

    def micro_batches(self, dp: int) -> int:
        """Return how many micro-batches each of `dp` replicas has; ValueError if not a whole."""
        unit = dp * self.micro_batch
        if self.batch % unit:
            below = self.batch // unit * unit
            near = f"{below} or {below + unit}" if below else f"{unit}"
            raise ValueError(
                f"batch {self.batch} is no multiple of dp × micro_batch = {dp} × "
                f"{self.micro_batch} = {unit}: use batch {near}"
            )
        return self.batch // unit
