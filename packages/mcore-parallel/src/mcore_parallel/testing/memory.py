"""What a computation leaves behind in memory, counted exactly and on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def kept_bytes(fn: Callable[[], T]) -> tuple[T, int]:
    """Return `fn()` and the bytes of storages made in it that are still alive while it is held.

    After a forward pass these are the activations kept for the backward pass, and the result.
    """
    with _Watch() as watch:
        result = fn()
    return result, sum(storage.nbytes() for storage in watch.storages)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if _is_plain(x)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if _is_plain(x) and id(x.untyped_storage()) not in before:
                self.storages.add(x.untyped_storage())
        return result


def _is_plain(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_meta
