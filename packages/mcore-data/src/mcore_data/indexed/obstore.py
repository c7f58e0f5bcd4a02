"""Objects of S3 and its like, Google, Azure and web servers, through the library `obstore`."""

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, TypeVar

import obstore
from obstore import exceptions
from obstore.store import from_url

from mcore_data.indexed.storage import ObjectChangedError, ObjectInfo

T = TypeVar("T")

# Ours are counted and waited for alike with every library.
_NO_RETRIES: Final = {"max_retries": 0}
_LOADED_IN: Final = os.getpid()  # the library's threads do not survive a fork


class ObstoreBackend:
    """One object behind the `ObjectBackend` interface."""

    def __init__(self, url: str, options: Mapping[str, Any], timeout_s: float) -> None:
        if os.getpid() != _LOADED_IN:
            raise OSError(f"{url}: obstore was in use before a fork; start workers by spawn")
        self._tag: str | None = None  # of the content that `info` found
        scheme, _, rest = url.partition("://")
        root, _, self._path = rest.partition("/")
        client: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
        if scheme == "http" or str(options.get("endpoint", "")).startswith("http://"):
            client["allow_http"] = True
        given = dict(options)
        client |= given.pop("client_options", {})
        open_store: Any = from_url  # its types are one set of options for each scheme
        try:
            self._store = open_store(
                f"{scheme}://{root}", client_options=client, retry_config=_NO_RETRIES, **given
            )
        except (exceptions.BaseError, ValueError, TypeError) as error:
            raise ValueError(f"{url}: {' '.join(str(error).split())}") from None

    def info(self) -> ObjectInfo:
        """Ask for the object's head."""
        meta = _translated(lambda: obstore.head(self._store, self._path))
        tag = meta.get("e_tag")
        # A weak tag matches nothing: it promises no equal bytes.
        self._tag = None if tag is None or tag.startswith("W/") else tag
        version = tag or meta.get("version") or str(meta["last_modified"])
        return ObjectInfo(size=int(meta["size"]), version=version)

    def read(self, begin: int, end: int) -> bytes:
        """Ask for a range, of the version that `info` has seen where it has a tag."""
        options: Any = {"range": (begin, end)}
        if self._tag is not None:
            options["if_match"] = self._tag
        return _translated(
            lambda: bytes(obstore.get(self._store, self._path, options=options).bytes())
        )


def _translated(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except (exceptions.NotFoundError, FileNotFoundError) as error:
        raise FileNotFoundError(str(error)) from None
    except exceptions.PreconditionError as error:
        raise ObjectChangedError(str(error)) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(str(error)) from None
    except exceptions.BaseError as error:
        raise OSError(str(error)) from None
