"""Object storage through the key-value stores of tensorstore: S3, Google, files or memory."""

from __future__ import annotations

from typing import Any

import tensorstore as ts

from mcore_ckpt.engine import Engine
from mcore_ckpt.object_storage import ObjectStorage, telling

_RETRIES = {"max_retries": 6}  # about a minute; by default tensorstore tries for a quarter hour


class KvStorage(ObjectStorage):
    """Objects below an address that tensorstore opens: `KvStorage("s3://bucket/runs/demo")`.

    url: such an address (`s3://`, `gs://`, `memory://`, `file://`), or a store's JSON
        specification. Chunks go through tensorstore, too.
    """

    def __init__(self, url: str | dict[str, Any]) -> None:
        retries = {"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES}
        store = ts.KvStore.open(url, context=ts.Context(retries)).result()
        if store.path and not store.path.endswith("/"):
            store.path += "/"
        self._store = store
        self._address = _address(store).rstrip("/")

    def engine(self) -> Engine:
        """Return tensorstore's."""
        from mcore_ckpt.tensorstore_engine import TensorstoreEngine

        return TensorstoreEngine()

    def at(self, path: str) -> ts.KvStore:
        """Return the store of what is below `path`, for tensorstore to open."""
        store = self._store.copy()
        store.path += f"{path}/"
        return store

    def location(self, path: str) -> str:
        """Return the address."""
        return f"{self._address}/{path}" if path else self._address

    def get(self, path: str) -> bytes:
        """Return an object's contents."""
        return self.get_part(path, 0)

    def get_part(self, path: str, start: int, stop: int | None = None) -> bytes:
        """Return some bytes of an object."""
        part: dict[str, Any] = {"byte_range": slice(start, stop)} if start or stop else {}
        with telling(self, path):
            found = self._store.read(path, **part).result()
        if found.state != "value":
            raise FileNotFoundError(2, "No such object", self.location(path))
        return bytes(found.value)

    def put(self, path: str, data: bytes) -> None:
        """Write an object."""
        with telling(self, path):
            self._store.write(path, data).result()

    def entries(self, path: str) -> dict[str, bool]:
        """List what is below a prefix."""
        prefix = f"{path}/" if path else ""
        with telling(self, path):
            keys = self._store.list(
                ts.KvStore.KeyRange(prefix, f"{path}0" if path else ""),  # '0' follows '/'
                strip_prefix_length=len(prefix),
            ).result()
        found: dict[str, bool] = {}
        for key in keys:
            name, slash, _ = key.decode().partition("/")
            found[name] = found.get(name, False) or bool(slash)
        return found

    def remove(self, path: str) -> None:
        """Delete an object."""
        with telling(self, path):
            self._store.write(path, None).result()

    def size(self, path: str) -> int | None:
        """Return the bytes of an object, which is read for it."""
        try:
            return len(self.get(path))
        except FileNotFoundError:
            return None

    def has(self, path: str, num_bytes: int | None) -> bool:
        """Return whether there is such an object: of its last byte, and one beyond, not of all."""
        if num_bytes is None:
            return self._reaches(path, 1)
        if not num_bytes:
            return self.size(path) == 0
        return self._reaches(path, num_bytes) and not self._reaches(path, num_bytes + 1)

    def _reaches(self, path: str, num_bytes: int) -> bool:
        try:
            self.get_part(path, num_bytes - 1, num_bytes)
        except FileNotFoundError:
            return False
        except OSError as error:
            if "OUT_OF_RANGE" not in str(error):
                raise
            return False
        return True


def _address(store: ts.KvStore) -> str:
    try:
        return str(store.url)
    except NotImplementedError:  # of what has none in tensorstore's eyes: another endpoint of S3's
        spec = store.spec().to_json()
        parts = (str(spec.get(key, "")).strip("/") for key in ("endpoint", "bucket", "path"))
        return "/".join(part for part in parts if part) or str(spec["driver"])
