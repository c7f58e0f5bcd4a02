"""Pickles, read without running anything that is in them.

A pickle is a program: it names functions and calls them. Here every name is looked up in a list of
what is known to do no more than make a value. Names below packages whose values appear in
checkpoints, but that need not be installed, become `Inert`: what they would have been made from,
and nothing else. Every other name is refused.
"""

from __future__ import annotations

import argparse
import collections
import io
import pathlib
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch

from mcore_ckpt.errors import CheckpointError


class Inert:
    """What a value of a class that is not looked up was made from: nothing of it is run.

    `args`: of its constructor. `state`: what it would have been given afterwards. `items`: what
    would have been appended or set. `name` of the class: where it was from.
    """

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Take note of the arguments."""
        made = object.__new__(cls)
        made.args, made.kwargs, made.state, made.items = args, kwargs, None, []
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...]
        self.kwargs: dict[str, Any]
        self.state: Any
        self.items: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        """Take note of an item."""
        self.items.append(item)

    def extend(self, items: Sequence[Any]) -> None:
        """Take note of some items."""
        self.items.extend(items)

    def __repr__(self) -> str:
        inside = [repr(arg) for arg in self.args]
        if self.state is not None:
            inside.append(f"state={self.state!r}")
        return f"{self.name}({', '.join(inside)})"


def fields(value: Any) -> dict[str, Any]:
    """Return the attributes that an object was pickled with, by name; {} when it has none.

    Of an `Inert`, of a namespace, or of a mapping.
    """
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return dict(vars(value))
    state = value.state if isinstance(value, Inert) else None
    if isinstance(state, tuple):  # of attributes and of slots
        parts = [part for part in state if isinstance(part, Mapping)]
        return {str(key): item for part in parts for key, item in part.items()}
    return {str(key): item for key, item in state.items()} if isinstance(state, Mapping) else {}


def _member(owner: Any, name: str) -> Inert:
    """How members of enumerations are pickled; of what is not looked up alone."""
    if isinstance(owner, type) and issubclass(owner, Inert):
        return owner(name)
    raise CheckpointError(f"it asks for {name!r} of {owner!r}, which is not looked up")


def _latin1(text: str, encoding: str) -> bytes:
    """How bytes are pickled by old protocols."""
    if encoding != "latin1":
        raise CheckpointError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


def _layout(name: str) -> str:
    """How the layout of a tensor is pickled."""
    return name


_array = np._core.multiarray  # type: ignore[attr-defined]
_KNOWN: Mapping[tuple[str, str], Any] = {
    **{
        ("builtins", kind.__name__): kind
        for kind in (
            *(set, frozenset, dict, list, tuple, slice, range),
            *(int, float, complex, bool, str, bytes, bytearray),
        )
    },
    ("builtins", "getattr"): _member,
    ("_codecs", "encode"): _latin1,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("io", "BytesIO"): io.BytesIO,
    ("_io", "BytesIO"): io.BytesIO,
    **{
        ("pathlib", name): pathlib.PurePosixPath
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")
    },
    **{
        (f"numpy.{core}.multiarray", name): getattr(_array, name)
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    },
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): _layout,
}
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_INERT = ("torch", "megatron", "transformer_engine", "apex", "modelopt", "nvidia_resiliency_ext")


class SafeUnpickler(pickle.Unpickler):
    """Reads one pickle. `known`: more names that may be looked up, and what they are."""

    def __init__(self, file: BinaryIO, known: Mapping[tuple[str, str], Any] | None = None) -> None:
        super().__init__(file)
        self._more = known or {}
        self._inert: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for; CheckpointError when it is not among what is known."""
        key = _RENAMED.get(module, module), name
        for table in (self._more, _KNOWN):
            if key in table:
                return table[key]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] in _INERT:
            if key not in self._inert:
                full = f"{module}.{name}"
                self._inert[key] = type(name.rpartition(".")[2], (Inert,), {"name": full})
            return self._inert[key]
        raise CheckpointError(f"it names {key[0]}.{name}, which is not looked up: nothing is run")


def load_pickle(
    file: BinaryIO,
    where: str,
    known: Mapping[tuple[str, str], Any] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what a pickle holds.

    where: the file, for messages. known: more names that may be looked up. persistent: what stands
    for a value that is kept outside of the pickle.

    Raises:
        CheckpointError: it is damaged, or names something that is not known to make values alone.
    """
    reader = SafeUnpickler(file, known)
    if persistent is not None:
        reader.persistent_load = persistent  # type: ignore[method-assign]
    try:
        return reader.load()
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except Exception as error:  # whatever a damaged program may run into
        raise CheckpointError(f"{where} is no pickle that can be read: {error!r}") from None
