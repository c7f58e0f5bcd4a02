"""Choices of routers taken down, and used again in another run over the same tokens.

Reinforcement learning needs it: what an engine generated is trained on with the experts that the
engine chose, although the trainer's rounding would choose others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from mcore_models.common.moe.router import Replay, Router
from mcore_models.common.moe.tokens import RoutedTokens
from mcore_parallel import Group, all_gather_object


class RouterRecord:
    """The experts that were chosen, by layer and by the global number of the token.

    Tokens are known by `TokenBatch.rows`, so that a record fits the same tokens in other batches
    and under other layouts. A rank takes down the tokens that it routes itself: `gathered` puts
    those of all ranks together.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[Tensor]] = {}
        self._tables: dict[int, Tensor] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of which there are choices, in order."""
        return tuple(sorted(self._parts))

    def add(self, layer: int, rows: Tensor, experts: Tensor, valid: Tensor | None = None) -> None:
        """Take down that tokens `rows` [N] chose `experts` [N, k] in a layer.

        `valid` [N] says which are no padding: among tokens of one number one of these counts.
        """
        real = torch.ones_like(rows) if valid is None else (valid > 0).to(rows.dtype)
        part = torch.cat([rows.unsqueeze(-1), real.unsqueeze(-1), experts], -1)
        self._parts.setdefault(layer, []).append(part.cpu())
        self._tables.pop(layer, None)

    def find(self, layer: int, rows: Tensor) -> Tensor:
        """Return the experts [N, k] that tokens `rows` [N] chose in a layer.

        Raises:
            ValueError: the record does not have one of them.
        """
        if layer not in self._parts:
            raise ValueError(f"the record has no choices of layer {layer}: it has {self.layers}")
        table = self._table(layer)
        wanted = rows.cpu()
        place = torch.searchsorted(table[:, 0].contiguous(), wanted).clamp(max=len(table) - 1)
        missing = wanted[table[place, 0] != wanted] if len(table) else wanted
        if len(missing):
            raise ValueError(
                f"the record has no choice of {len(missing)} of {len(wanted)} tokens in layer "
                f"{layer}, first of row {int(missing[0])}"
            )
        return table[place, 2:].to(rows.device)

    def gathered(self, group: Group) -> "RouterRecord":
        """Return the records of all ranks of the group as one; all of them call it."""
        whole = RouterRecord()
        tables = {layer: self._table(layer) for layer in self.layers}
        for theirs in all_gather_object(tables, group):
            for layer, table in theirs.items():
                whole._parts.setdefault(layer, []).append(table)
        return whole

    def _table(self, layer: int) -> Tensor:
        """Sorted by row, each of them once: [rows, 2 + k]."""
        if layer not in self._tables:
            table = torch.cat(self._parts[layer])
            table = table[table[:, 1].argsort(stable=True, descending=True)]
            table = table[table[:, 0].argsort(stable=True)]
            first = torch.ones(len(table), dtype=torch.bool)
            first[1:] = table[1:, 0] != table[:-1, 0]
            self._tables[layer] = table[first]
            self._parts[layer] = [table[first]]  # without what layers routed again in backward
        return self._tables[layer]


@contextmanager
def recorded(model: nn.Module) -> Iterator[RouterRecord]:
    """Within the block, take down what the model's routers choose, or are told to choose.

    A backward pass in the block changes nothing: layers that are recomputed choose as before. What
    only fills up shares of documents is no token, and left out.
    """
    record = RouterRecord()

    def take(layer: int, tokens: RoutedTokens, experts: Tensor) -> None:
        rows, valid, real = tokens.rows(), tokens.weights(torch.float32), _real(tokens)
        if real is None:
            record.add(layer, rows, experts, valid)
        else:
            record.add(layer, rows[real], experts[real], valid[real])

    with _choices(model, lambda choices: replace(choices, takes=(*choices.takes, take))):
        yield record


@contextmanager
def replayed(model: nn.Module, record: RouterRecord) -> Iterator[None]:
    """Within the block, the model's routers choose as the record says.

    Outputs are weighted by the scores that the chosen experts have now, with their gradients. What
    only fills up shares of documents is in no record, and keeps what the router chooses for it. A
    layer that is recomputed routes again in the backward pass, which then belongs in the block too.
    ValueError in the forward pass when a token is not in the record, or the choices are not of as
    many experts as the router chooses, or of one that it does not have.
    """

    def give(layer: int, tokens: RoutedTokens, experts: Tensor) -> Tensor:
        rows, real = tokens.rows(), _real(tokens)
        if real is None:
            return record.find(layer, rows)
        found = record.find(layer, rows[real])
        if found.shape[1] != experts.shape[1]:
            return found  # refused by the router
        return experts.index_put((real,), found)

    with _choices(model, lambda choices: replace(choices, give=give)):
        yield


def _real(tokens: RoutedTokens) -> Tensor | None:
    """Which are tokens of the data [N]; None: all. Others have the number 0, of another token."""
    real = tokens.batch.real
    return None if real is None else real[tokens.mine]


_Take: TypeAlias = Callable[[int, RoutedTokens, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """A `Replay`: the innermost `give` decides, and all `takes` see what it is in the end."""

    give: Replay | None = None
    takes: tuple[_Take, ...] = ()

    def __call__(self, layer: int, tokens: RoutedTokens, experts: Tensor, /) -> Tensor:
        chosen = experts if self.give is None else self.give(layer, tokens, experts)
        for take in self.takes:
            take(layer, tokens, chosen)
        return chosen


@contextmanager
def _choices(model: nn.Module, change: Callable[[_Choices], _Choices]) -> Iterator[None]:
    routers = [module for module in model.modules() if isinstance(module, Router)]
    before = [router.replay for router in routers]
    for router, old in zip(routers, before, strict=True):
        router.replay = change(old if isinstance(old, _Choices) else _Choices(give=old))
    try:
        yield
    finally:
        for router, old in zip(routers, before, strict=True):
            router.replay = old
