"""How chunks are compressed: codecs of zarr v3 that zarr-python and tensorstore both read."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

_LEVELS = {"zstd": (1, 22), "blosc": (0, 9)}
_DEFAULT = {"zstd": 3, "blosc": 5}
_COMPRESSORS = ("lz4", "lz4hc", "blosclz", "zstd", "zlib")


@dataclass(frozen=True)
class Codec:
    """A compression of chunks: `zstd`, or `blosc`, which shuffles bytes first.

    level: 1 to 22 for zstd, 0 to 9 for blosc; more is smaller and slower. compressor: of blosc.
    """

    name: str
    level: int
    compressor: str = ""

    @staticmethod
    def parse(text: str) -> Codec:
        """Return the codec that is written `zstd`, `zstd:LEVEL`, `blosc` or `blosc:NAME:LEVEL`.

        Raises:
            ValueError: it is none of these; names the nearest valid one.
        """
        name, *rest = text.split(":")
        if name not in _LEVELS:
            near = get_close_matches(name, _LEVELS, n=1, cutoff=0.0)[0]
            raise ValueError(f"compression {text!r} is unknown: 'zstd' or 'blosc' (nearest {near})")
        compressor = ""
        if name == "blosc":
            compressor = rest.pop(0) if rest else _COMPRESSORS[0]
            if compressor not in _COMPRESSORS:
                near = get_close_matches(compressor, _COMPRESSORS, n=1, cutoff=0.0)[0]
                raise ValueError(
                    f"compression {text!r}: blosc has no {compressor!r} (nearest {near}): it is "
                    f"written blosc:NAME:LEVEL with {', '.join(_COMPRESSORS)}"
                )
        level = rest.pop(0) if rest else str(_DEFAULT[name])
        low, high = _LEVELS[name]
        if rest or not level.isdecimal() or not low <= int(level) <= high:
            form = "blosc:NAME:LEVEL" if name == "blosc" else "zstd:LEVEL"
            raise ValueError(
                f"compression {text!r} must be {form} with a level from {low} to {high} "
                f"(nearest: {str(Codec(name, _nearest(level, low, high), compressor))!r})"
            )
        return Codec(name, int(level), compressor)

    def __str__(self) -> str:
        return ":".join(filter(None, (self.name, self.compressor, str(self.level))))

    def document(self, itemsize: int) -> dict[str, Any]:
        """Return the codec as array metadata has it, for elements of so many bytes."""
        if self.name == "zstd":
            return {"name": "zstd", "configuration": {"level": self.level, "checksum": False}}
        return {
            "name": "blosc",
            "configuration": {
                "cname": self.compressor,
                "clevel": self.level,
                "shuffle": "shuffle" if itemsize > 1 else "noshuffle",
                "typesize": itemsize,
                "blocksize": 0,
            },
        }


def _nearest(level: str, low: int, high: int) -> int:
    number = int(level) if level.lstrip("-").isdecimal() else low
    return min(max(number, low), high)
