"""The end of a save: when the chunks are durable, everything else, and the commit."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.commit import commit
from mcore_ckpt.documents import all_documents
from mcore_ckpt.manifest import FileInfo, Manifest, TensorInfo, producer, sha256
from mcore_ckpt.names import DOCUMENT, FILES
from mcore_ckpt.storage import Storage
from mcore_ckpt.writer import Writer


def complete(
    storage: Storage,
    name: str,
    writer: Writer,
    *,
    step: int,
    tensors: Mapping[str, TensorInfo],
    state: Any,
    files: Mapping[str, bytes],
) -> None:
    """Write the remaining documents, the attached files, the manifest and the marker.

    tensors: with the checksums of all chunks. The document of an array that has chunks came with
    its first one. files: contents by path below `files/`.
    """
    documents = all_documents(tensors)
    written = {f"{tensor}/{DOCUMENT}" for tensor, info in tensors.items() if info.crc32}
    for path, data in documents.items():
        if path not in written:
            writer.put(path, data)
    for file, data in files.items():
        writer.put(f"{FILES}/{file}", data)
    writer.sync()
    manifest = Manifest(
        step=step,
        tensors=tensors,
        documents={path: zlib.crc32(data) for path, data in documents.items()},
        files={
            file: FileInfo(num_bytes=len(data), sha256=sha256(data)) for file, data in files.items()
        },
        state=state,
        producer=producer(),
    )
    commit(storage, name, manifest.encode(), version=manifest.version)
