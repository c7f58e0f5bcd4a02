"""Documents whose attention is cut over heads, where their tokens are cut over ranks, too.

T tokens of this rank, Q heads of it (of its tensor-parallel share); under context parallelism of n
ranks T are a share of every document, and Q / n the heads with which a rank attends.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from mcore_models.common.batch import TokenBatch
from mcore_models.common.context import KVCache
from mcore_parallel.context import HeadExchange, WideRows


@runtime_checkable
class PairedCache(KVCache, Protocol):
    """What layers keep of two texts: of the one that is written, and of its `source`.

    The batch of the call holds the new tokens of both; of a source most often all at once, and
    none from then on.
    """

    @property
    def source(self) -> KVCache:
        """What layers that read keep of the encoder's tokens."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """The documents of a batch, whole, as attention over this rank's heads takes them.

    `cu_seqlens`, `max_seqlen` and `uniform` as in `TokenBatch`. `exchange` is how ranks of a
    context-parallel group bring each other their rows, None where all rows are here.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    uniform: tuple[int, int] | None = None
    exchange: tuple[HeadExchange, WideRows] | None = None

    @staticmethod
    def of(batch: TokenBatch, exchange: HeadExchange) -> "Text":
        """Those of a batch; the ranks of `exchange` hold shares of it."""
        bounds, rows = batch.cu_seqlens, batch.num_tokens
        if exchange.group.size == 1:
            return Text(cu_seqlens=bounds, max_seqlen=batch.max_seqlen, uniform=batch.uniform)
        wide = exchange.widen(
            (bounds, bounds), batch.uniform, (rows, rows), bounds.device, lengths=batch.lengths
        )
        return Text(
            cu_seqlens=wide.cu_seqlens,
            max_seqlen=wide.max_seqlen,
            uniform=wide.uniform,
            exchange=(exchange, wide),
        )

    def to_heads(self, *parts: Tensor) -> list[Tensor]:
        """Parts [T, Q, D] of all ranks as [n · T, Q / n, D], without what fills up documents."""
        if self.exchange is None:
            return list(parts)
        exchange, wide = self.exchange
        return exchange.to_heads(parts, wide)

    def to_rows(self, x: Tensor) -> Tensor:
        """The way back, to [T, Q, D]."""
        if self.exchange is None:
            return x
        exchange, wide = self.exchange
        return exchange.to_rows(x, wide)

    def my_heads(self, table: Tensor) -> Tensor:
        """The columns of a table [rows, Q] for the heads with which this rank attends."""
        return table if self.exchange is None else self.exchange[0].my_heads(table, 1)
