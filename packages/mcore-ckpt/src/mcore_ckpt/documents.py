"""The zarr v3 documents of a checkpoint: one `zarr.json` for each array and each group."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.manifest import TensorInfo
from mcore_ckpt.names import DOCUMENT, groups_of


def array_document(info: TensorInfo) -> dict[str, Any]:
    """Return the zarr v3 array metadata of a tensor: uncompressed little-endian chunks."""
    stored = stored_type(info.dtype)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(info.shape),
        "data_type": stored.zarr,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(info.chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": stored.fill_value,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {"dtype": info.dtype},
    }


def group_document() -> dict[str, Any]:
    """Return the zarr v3 metadata of a group below the root."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def root_document(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return the root group with every document below it inlined.

    zarr-python then lists the whole checkpoint from one file, and does not stumble over the files
    beside the arrays that are none of zarr's. Readers that do not know the field may ignore it.
    """
    inlined: dict[str, Any] = {group: group_document() for group in all_groups(tensors)}
    inlined |= {name: array_document(info) for name, info in tensors.items()}
    consolidated = {"kind": "inline", "must_understand": False, "metadata": inlined}
    return {**group_document(), "consolidated_metadata": consolidated}


def all_groups(names: Iterable[str]) -> list[str]:
    """Return every group above the arrays of these names but the root, sorted."""
    return sorted({group for name in names for group in groups_of(name)})


def all_documents(tensors: Mapping[str, TensorInfo]) -> dict[str, bytes]:
    """Return every document of a checkpoint by its path within it."""
    documents = {DOCUMENT: encode(root_document(tensors))}
    for group in all_groups(tensors):
        documents[f"{group}/{DOCUMENT}"] = encode(group_document())
    for name, info in tensors.items():
        documents[f"{name}/{DOCUMENT}"] = encode(array_document(info))
    return documents


def encode(document: Mapping[str, Any]) -> bytes:
    """Return a document as the bytes of its file."""
    return (json.dumps(document, indent=1) + "\n").encode()
