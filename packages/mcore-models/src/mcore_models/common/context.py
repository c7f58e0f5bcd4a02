"""What the layers of a model may ask besides hidden states: of the batch, of earlier tokens.

T tokens of N sequences, t of them with hidden states here, H hidden.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from mcore_models.common.batch import TokenBatch
from mcore_parallel import RngKey, dropout

if TYPE_CHECKING:
    from mcore_models.common.auxiliary import AuxiliaryLosses


class KVCache(Protocol):
    """Where layers keep what they need of earlier tokens while decoding.

    Attention keeps keys and values, one row per token; a recurrent mixer keeps states, whose size
    does not grow. The batch of the call holds only new tokens; `batch.cu_seqlens` bounds the new
    tokens of each of its N sequences and `batch.positions` continues each sequence's count.
    """

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Store new entries and return everything that the new queries may see.

        Args:
            layer: global layer index.
            k: new keys [T, K, D], positions already applied; K are this rank's heads.
            v: new values [T, K, D].

        Returns:
            `(k_all, v_all, cu_seqlens_k, max_seqlen_k)`: all keys and values of the batch's
            sequences in their order, old before new, their bounds [N+1] int32 and the longest.
            The last query of a sequence sees all of its keys, the one before it one less.
        """
        ...

    def append(
        self, layer: int, rows: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Tensor, int]:
        """Store what a layer keeps of each new token, whatever that is, and return all it has.

        `extend` is this for keys and values; latent attention keeps what it makes them from.

        Args:
            layer: global layer index.
            rows: of the new tokens, each [T, …].

        Returns:
            `(all_rows, cu_seqlens_k, max_seqlen_k)`: the rows of the batch's sequences in their
            order, old before new, in the order of `rows`; their bounds and the longest.
        """
        ...

    def recall(self, layer: int) -> tuple[Tensor, ...] | None:
        """The states that this layer last kept of the batch's sequences, each [N, …].

        Zeros for a sequence of which it kept none; None when that is so for all of them.
        """
        ...

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """Keep this layer's states of the batch's sequences, each [N, …], for their next tokens."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenContext:
    """What a mixer or feed-forward may ask besides the hidden states, the same for all layers.

    `rotary` = (cos, sin), each [T, R/2] fp32 for the R channels of a head that turn, `None` without
    rotary positions; `rotary_local` the same of local layers where they differ, `latent_rotary`
    for the rotary channels of latent attention. `auxiliary` takes
    the losses of layers; `None` where nothing is trained. `rng` is the key of what else is random
    in this step, `None` without. `in_turns` asks a part that waits for messages to return `Steps`
    (`mcore_parallel.expert`), which yield meanwhile, in place of its output.
    """

    batch: TokenBatch
    rotary: tuple[Tensor, Tensor] | None = None
    rotary_local: tuple[Tensor, Tensor] | None = None
    latent_rotary: tuple[Tensor, Tensor] | None = None
    cache: KVCache | None = None
    dropout: "ResidualDropout | None" = None
    auxiliary: "AuxiliaryLosses | None" = None
    rng: RngKey | None = None
    in_turns: bool = False

    def check_shares(self, wanted: int) -> None:
        """Check that a layer over `wanted` context-parallel ranks can run this batch.

        Raises:
            ValueError: the batch is not one of so many shares, or there is a cache for shares.
        """
        if self.batch.shares != wanted:
            raise ValueError(
                f"the batch is one of {self.batch.shares} shares of its documents and cp={wanted}: "
                f"give each rank TokenBatch.share(cp.rank, {wanted}) of the whole"
            )
        if wanted > 1 and self.cache is not None:
            raise ValueError(f"earlier tokens cannot be cached over cp={wanted} ranks: use cp=1")


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualDropout:
    """Dropout whose mask depends on the key, the place in the model and the global token alone.

    `rows` [t] are the global numbers of the tokens whose hidden states this rank holds.
    """

    probability: float
    key: RngKey
    rows: Tensor

    def __call__(self, hidden: Tensor, *place: int | str) -> Tensor:
        """`hidden` [t, H] with elements dropped and the rest scaled by 1 / (1 - probability)."""
        return dropout(hidden, self.probability, self.key.fold(*place), self.rows)
