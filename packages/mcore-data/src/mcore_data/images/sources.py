"""Pairs of an encoded image and a text, readable in any order: tar files, JSON lines."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from mcore_data.images.tar import Member, tar_members

IMAGE_SUFFIXES: Final = ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "ppm")


@dataclass(frozen=True, kw_only=True)
class ImageText:
    """An image as it is stored, and its text.

    Attributes:
        key: name of the pair.
        image: the encoded bytes, of any kind that Pillow reads.
        text: what belongs to it.
        where: file and place, for messages.

    """

    key: str
    image: bytes
    text: str
    where: str


class ImageTextSource(Protocol):
    """Pairs by number."""

    def __len__(self) -> int:
        """Return the number of pairs."""
        ...

    def __getitem__(self, index: int, /) -> ImageText:
        """Return pair `index`; ValueError, naming its place, when it cannot be read."""
        ...


def _paths(paths: str | Path | Iterable[str | Path], suffix: str) -> list[Path]:
    """Return the files that `paths` name: files, or folders with files of that suffix."""
    found: list[Path] = []
    for item in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(item)
        files = sorted(path.glob(f"*{suffix}")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: a folder without {suffix} files")
        if not files[0].is_file():
            raise ValueError(f"{path}: no such file or folder")
        found += files
    if not found:
        raise ValueError(f"no {suffix} file given")
    return found


class TarImages:
    """Pairs in tar files, in the WebDataset way: `0001.jpg` and `0001.txt` side by side are one.

    A name up to the first point of its last part is the key; the rest says what the member is. Each
    tar file is read through once, headers only; its members are then read where they lie.

    Args:
        paths: tar files, or folders of them, not compressed.
        text_key: None: the text is that of the member `txt`; else it stands under this key of the
            object in the member `json`.

    Attributes:
        left_out: keys without an image or without a text.

    Raises:
        ValueError: one line with file and place: no tar file, a damaged one, a member that leads
            out of the archive or is no plain file, or no pair at all.

    """

    def __init__(
        self, paths: str | Path | Iterable[str | Path], *, text_key: str | None = None
    ) -> None:
        self.paths = tuple(_paths(paths, ".tar"))
        self.text_key = text_key
        self.left_out = 0
        self._keys: list[str] = []
        places: list[tuple[int, ...]] = []
        for shard, path in enumerate(self.paths):
            for key, members in _groups(tar_members(path)):
                image = next((members[s] for s in IMAGE_SUFFIXES if s in members), None)
                text = members.get("txt" if text_key is None else "json")
                if image is None or text is None:
                    self.left_out += 1
                    continue
                self._keys.append(key)
                places.append((shard, image.offset, image.size, text.offset, text.size))
        if not places:
            raise ValueError(
                f"{self.paths[0]}: no pair of image and text ({self.left_out} left out)"
            )
        self._places = np.array(places, np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> ImageText:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.paths[0]}: pair {index} of {len(self)}")
        shard, begin, size, text_begin, text_size = self._places[index].tolist()
        path, key = self.paths[shard], self._keys[index]
        where = f"{path}: {key!r}"
        with open(path, "rb") as file:
            image, raw = (
                os.pread(file.fileno(), length, start)
                for length, start in ((size, begin), (text_size, text_begin))
            )
        if len(image) != size or len(raw) != text_size:
            raise ValueError(f"{where}: the file has become shorter")
        return ImageText(key=key, image=image, text=self._text(raw, where), where=where)

    def _text(self, raw: bytes, where: str) -> str:
        if self.text_key is None:
            try:
                return raw.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: text is no UTF-8 at byte {error.start}") from None
        return _string(_object(raw, where), self.text_key, where)


def _groups(members: Iterable[Member]) -> Iterable[tuple[str, dict[str, Member]]]:
    """Yield members that follow each other under one key, by what the rest of the name says."""
    key, group = "", dict[str, Member]()
    for member in members:
        folder, _, name = member.name.rpartition("/")
        stem, _, suffix = name.partition(".")
        here = f"{folder}/{stem}" if folder else stem
        if here != key or suffix.lower() in group:
            if group:
                yield key, group
            key, group = here, {}
        group[suffix.lower()] = member
    if group:
        yield key, group


class JsonlImages:
    """Pairs in JSON lines: each an object with the path of an image and its text.

    Args:
        path: the JSONL file.
        root: folder that the paths of images start from (default: that of the file). No path leads
            out of it.
        image_key, text_key: where path and text stand.

    Raises:
        ValueError: from the constructor when there is no line; from an access, with file and line,
            when it holds no such object or the image is not there.

    """

    def __init__(
        self,
        path: str | Path,
        *,
        root: str | Path | None = None,
        image_key: str = "image",
        text_key: str = "text",
    ) -> None:
        self.path = _paths(path, ".jsonl")[0]
        self.root = self.path.parent if root is None else Path(root)
        self.image_key = image_key
        self.text_key = text_key
        places: list[tuple[int, int, int]] = []
        begin = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    places.append((number, begin, len(line)))
                begin += len(line)
        if not places:
            raise ValueError(f"{self.path}: it holds no line")
        self._places = np.array(places, np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> ImageText:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: line {index} of {len(self)}")
        number, begin, size = self._places[index].tolist()
        where = f"{self.path}:{number}"
        with open(self.path, "rb") as file:
            value = _object(os.pread(file.fileno(), size, begin), where)
        name = _string(value, self.image_key, where)
        text = _string(value, self.text_key, where)
        image = self.root / name
        if not image.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(f"{where}: image {name!r} leads out of {self.root}")
        try:
            return ImageText(key=name, image=image.read_bytes(), text=text, where=where)
        except OSError as error:
            raise ValueError(f"{where}: image {name!r}: {error.strerror}") from None


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON ({' '.join(str(error).split())})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON {type(value).__name__}, not an object")
    return value


def _string(value: dict[str, Any], key: str, where: str) -> str:
    found = value.get(key)
    if not isinstance(found, str):
        keys: Sequence[str] = list(value)[:8]
        raise ValueError(f"{where}: no text under {key!r}; keys are {', '.join(map(repr, keys))}")
    return found
