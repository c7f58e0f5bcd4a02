"""Zstandard files, through the library `zstandard` (extra `zstd`)."""

import io
from pathlib import Path
from typing import IO, Any, Final

_CHUNK: Final = 1 << 18


class _Unpacked(io.RawIOBase):
    """The content of a Zstandard file; unlike the library's own reader it notices a cut end."""

    def __init__(self, path: Path, library: Any) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed in close
        self._library = library
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._file.read(_CHUNK)
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._ready = self._unpack(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, packed: bytes) -> bytes:
        parts = []
        while packed:
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                parts.append(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from None
            if not self._frame.eof:
                break
            packed, self._frame = self._frame.unused_data, None
        return b"".join(parts)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_zstd(path: Path) -> IO[bytes]:
    """Open a `.zst` file; EOFError while reading says that it is damaged.

    ValueError when the library is not installed.
    """
    try:
        import zstandard
    except ImportError:
        raise ValueError(
            f"{path}: reading it needs zstandard: pip install 'mcore-data[zstd]'"
        ) from None
    return io.BufferedReader(_Unpacked(path, zstandard), _CHUNK)
