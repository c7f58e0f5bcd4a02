"""Which linear layers get low-rank adapters, and of what size."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters y = W x + scale · B (A x) (Hu et al., "LoRA", 2021).

    `targets` are patterns of the names of linear layers as global tensors have them, without
    `.weight`: `layers.*.attention.q`, `layers.*.mlp.*`; `*` stands for any text, also with dots.
    The scale is alpha / rank, or alpha / √rank with `rank_stabilized` (Kalajdzievski, 2023).
    `dropout` is that of the input of A; linears that are fused share its mask.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rank_stabilized: bool = False
    targets: tuple[str, ...] = ("layers.*",)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank} must be at least 1")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha={self.alpha} must be greater than 0 and finite")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout={self.dropout} must lie in 0 <= dropout < 1")
        if not self.targets:
            raise ValueError("lora.targets is empty: name a linear layer, such as layers.*.mlp.*")

    @property
    def scale(self) -> float:
        """What B (A x) is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
