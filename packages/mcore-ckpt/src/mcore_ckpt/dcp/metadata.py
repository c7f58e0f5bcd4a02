"""`.metadata` of a DCP folder: which tensors and objects there are, and where their bytes lie.

The file is a pickle of torch's own classes; it is read without running it (`torchfile`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.torchfile import Inert, fields, load_pickle
from mcore_parallel.layout import Box
from mcore_parallel.mapping import TensorMeta

METADATA = ".metadata"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Bytes of a file: a chunk of a tensor, or an object."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class DcpTensor:
    """A tensor and the regions that it is stored in."""

    meta: TensorMeta
    chunks: Mapping[Box, Stored]


@dataclass(frozen=True, kw_only=True)
class DcpMetadata:
    """What a folder holds, by name."""

    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, Stored]


def read_metadata(folder: Path) -> DcpMetadata:
    """Return what a folder says that it holds; nothing else is opened.

    Raises:
        FileNotFoundError: there is no `.metadata`.
        CheckpointError: it is damaged, holds what is not looked up, or asks for what is not
            supported; names the file and the tensor.
    """
    path = folder / METADATA
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {METADATA}: no torch.distributed.checkpoint")
    with path.open("rb") as file:
        found = fields(load_pickle(file, str(path)))
    try:
        described, stored = found["state_dict_metadata"], found["storage_data"]
        places = _places(stored, path)
        tensors, objects = {}, {}
        for name, value in described.items():
            if _kind(value) == "BytesStorageMetadata":
                objects[name] = places[name, None]
            else:
                tensors[name] = _tensor(name, fields(value), places)
    except KeyError as error:
        raise CheckpointError(f"{path} is damaged: {error} is missing") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return DcpMetadata(tensors=tensors, objects=objects)


def _kind(value: Any) -> str:
    return value.name.rpartition(".")[2] if isinstance(value, Inert) else type(value).__name__


def _places(
    stored: Mapping[Any, Any], path: Path
) -> dict[tuple[str, tuple[int, ...] | None], Stored]:
    places = {}
    for key, value in stored.items():
        index, info = fields(key), fields(value)
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{path}: {index['fqn']} is stored through {info['transform_descriptors']}, which "
                f"is not supported: save without extensions"
            )
        file = str(info["relative_path"])
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise CheckpointError(f"{path}: {index['fqn']} is in {file!r}, outside of the folder")
        offset = index.get("offset")
        place = None if offset is None else tuple(int(n) for n in offset)
        places[str(index["fqn"]), place] = Stored(
            file=file, offset=int(info["offset"]), num_bytes=int(info["length"])
        )
    return places


def _tensor(
    name: str,
    value: Mapping[str, Any],
    places: Mapping[tuple[str, tuple[int, ...] | None], Stored],
) -> DcpTensor:
    properties = value["properties"]
    state = properties.state if isinstance(properties, Inert) else None
    dtype = state[0] if isinstance(state, tuple) else fields(properties)["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has dtype {dtype!r}")
    shape = tuple(int(n) for n in value["size"])
    chunks = {}
    for chunk in map(fields, value["chunks"]):
        box = Box(tuple(chunk["offsets"]), tuple(chunk["sizes"]))
        if not Box.whole(shape).contains(box):
            raise ValueError(f"{name} has shape {list(shape)} and a chunk {box}")
        if box.numel or not shape:
            chunks[box] = places[name, box.start]
    return DcpTensor(meta=TensorMeta(shape, dtype), chunks=chunks)
