"""The configuration of latent attention."""

import math
from dataclasses import dataclass

from mcore_models._checks import check_positive, nearest_multiples
from mcore_models.parts.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434), pattern letter `+`.

    A token is pressed into `kv_rank` numbers, from which the keys and values of all `num_heads`
    heads are made, and `rope_dim` channels that turn with its position, which all heads share. A
    head's keys have `head_dim` channels of its own and then those; its values have `value_dim`.
    Queries, `head_dim` + `rope_dim` channels for each head, come from `q_rank` numbers of their
    token, or directly from the hidden state where that is None. What is pressed goes through an RMS
    norm with `norm_eps`. A cache keeps the `kv_rank` + `rope_dim` numbers of a token alone.

    Positions are those of the model: with its `position` "rope", the rotary channels turn by
    `rope_base` and `rope`; with "none" they are plain channels.

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    num_heads: int
    kv_rank: int = 512
    q_rank: int | None = None
    head_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_rank", "head_dim", "rope_dim", "value_dim"):
            check_positive(f"latent.{name}", getattr(self, name))
        if self.q_rank is not None:
            check_positive("latent.q_rank", self.q_rank)
        if self.rope_dim % 2:
            raise ValueError(
                f"latent.rope_dim={self.rope_dim} channels turn in pairs: "
                f"use {nearest_multiples(self.rope_dim, 2)}"
            )
        if not 0 < self.norm_eps < math.inf:
            raise ValueError(f"latent.norm_eps={self.norm_eps} must be greater than 0 and finite")

    @property
    def query_dim(self) -> int:
        """Channels of a head's queries and keys."""
        return self.head_dim + self.rope_dim

    @property
    def kept_dim(self) -> int:
        """Numbers that a cache keeps of each token."""
        return self.kv_rank + self.rope_dim

    def check_rope(self, rope: RopeConfig) -> None:
        """Check that the model's rotary positions are some that these channels can take.

        Raises:
            ValueError: one line with the field and the value that fits.
        """
        if rope.rotary_dim is not None:
            raise ValueError(
                f"rope.rotary_dim={rope.rotary_dim} with latent attention, of which "
                f"latent.rope_dim={self.rope_dim} channels turn: leave it out"
            )
        if rope.sections is not None:
            raise ValueError(f"rope.sections={rope.sections} with latent attention: leave them out")
        if rope.scaling == "longrope":
            raise ValueError("rope.scaling='longrope' with latent attention: use 'yarn'")
        rope.check_size(self.rope_dim)

    def scale(self, rope: RopeConfig) -> float:
        """The factor on scores: query_dim^-½, times the square of YaRN's term for all channels.

        cos and sin, which turn some channels only, are multiplied by a quotient of two such terms;
        the divisor is put back here for all channels (DeepSeek's `mscale_all_dim`).
        """
        plain = 1 / math.sqrt(self.query_dim)
        if rope.scaling != "yarn" or not rope.mscale_all_dim:
            return plain
        return plain * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
