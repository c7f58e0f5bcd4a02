"""The zarr v3 documents of a checkpoint: one `zarr.json` for each array and each group."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.manifest import TensorInfo
from mcore_ckpt.names import DOCUMENT, groups_of


def array_document(info: TensorInfo) -> dict[str, Any]:
    """Return the zarr v3 array metadata of a tensor: little-endian chunks, and its codec."""
    stored = stored_type(info.dtype)
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if info.codec is not None:
        codecs.append(info.codec.document(stored.itemsize))
    if info.file_shape is not None:
        index = {"name": "bytes", "configuration": {"endian": "little"}}
        inner = {
            "chunk_shape": list(info.chunk_shape),
            "codecs": codecs,
            "index_codecs": [index, {"name": "crc32c"}],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(info.shape),
        "data_type": stored.zarr,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(info.files.chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": stored.fill_value,
        "codecs": codecs,
        "attributes": {"dtype": info.dtype},
    }


def group_document() -> dict[str, Any]:
    """Return the zarr v3 metadata of a group below the root."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


class ArrayDocuments:
    """The files of arrays, put together once for all tensors of one dtype, shape and chunks.

    A checkpoint of thousands of tensors has few kinds of them, and indented JSON is slow to make.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], bytes] = {}

    def __call__(self, info: TensorInfo) -> bytes:
        """Return the bytes of an array's document."""
        kind = (info.dtype, info.shape, info.chunk_shape, info.codec, info.file_shape)
        if kind not in self._made:
            self._made[kind] = encode(array_document(info))
        return self._made[kind]


def root_document(inlined: Mapping[str, bytes]) -> bytes:
    """Return the file of the root group, which has every document below it in it, by its path.

    zarr-python then lists the whole checkpoint from one file, and does not stumble over the files
    beside the arrays that are none of zarr's. Readers that do not know the field may ignore it.
    """
    consolidated = {"kind": "inline", "must_understand": False, "metadata": {}}
    empty = encode({**group_document(), "consolidated_metadata": consolidated})
    if not inlined:
        return empty
    before, after = empty.split(b'"metadata": {}')
    entries = (  # as `encode` would indent them three levels down
        b"   " + json.dumps(path).encode() + b": " + document.rstrip().replace(b"\n", b"\n   ")
        for path, document in inlined.items()
    )
    return before + b'"metadata": {\n' + b",\n".join(entries) + b"\n  }" + after


def all_groups(names: Iterable[str]) -> list[str]:
    """Return every group above the arrays of these names but the root, sorted."""
    return sorted({group for name in names for group in groups_of(name)})


def all_documents(tensors: Mapping[str, TensorInfo]) -> dict[str, bytes]:
    """Return every document of a checkpoint by its path within it."""
    of_array = ArrayDocuments()
    group = encode(group_document())
    below = dict.fromkeys(all_groups(tensors), group)
    below |= {name: of_array(info) for name, info in tensors.items()}
    files = {f"{path}/{DOCUMENT}": document for path, document in below.items()}
    return {DOCUMENT: root_document(below), **files}


def encode(document: Mapping[str, Any]) -> bytes:
    """Return a document as the bytes of its file."""
    return (json.dumps(document, indent=1) + "\n").encode()
