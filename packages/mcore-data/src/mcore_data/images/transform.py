"""From an encoded image to numbers: resize, crop, normalise."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Three = tuple[float, float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """Makes every image one of `size`, as numbers of mean 0 and deviation 1.

    Attributes:
        size: height and width in pixels.
        fit: how an image of other proportions gets there. `crop`: its shorter side is made to fit
            and what is too long of the other is cut off; `pad`: its longer side is made to fit and
            the rest filled with the mean; `stretch`: both sides are made to fit.
        random: with `crop`, at a random place, after the shorter side was made up to `zoom` times
            as long, and mirrored half of the time; otherwise in the middle.
        zoom: the most that a random crop enlarges.
        mean, std: of red, green and blue, where 1 is full (default: those of CLIP).

    Raises:
        ValueError: a number makes no sense.

    """

    size: tuple[int, int]
    fit: Literal["crop", "pad", "stretch"] = "crop"
    random: bool = False
    zoom: float = 1.5
    mean: Three = (0.48145466, 0.4578275, 0.40821073)
    std: Three = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"size is {self.size}, the least is 1 x 1")
        if self.fit not in ("crop", "pad", "stretch"):
            raise ValueError(f"fit is {self.fit!r}, it can be crop, pad or stretch")
        if self.random and self.fit != "crop":
            raise ValueError(f"random goes with fit='crop', it is {self.fit!r}")
        if self.zoom < 1 or min(self.std) <= 0:
            raise ValueError(f"zoom {self.zoom} must be at least 1 and std {self.std} above 0")

    def __call__(
        self, image: bytes, *, seed: tuple[int, ...] = (0,), where: str = "image"
    ) -> NDArray[np.float32]:
        """Return red, green and blue, float32 [3, height, width].

        The same image and `seed` give the same numbers. ValueError, with `where`, for bytes that
        are no image.
        """
        try:
            from mcore_data.images.pillow import open_rgb, resized
        except ModuleNotFoundError as error:
            if error.name != "PIL":
                raise
            raise ValueError(
                f"{where}: reading it needs Pillow: pip install 'mcore-data[images]'"
            ) from None
        picture = open_rgb(image, where)
        inside, box = self._place(picture.height, picture.width, np.random.default_rng(seed))
        height, width = (part.stop - part.start for part in inside)
        pixels = resized(picture, height, width, box)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        values = np.zeros((*self.size, 3), np.float32)
        values[inside] = (pixels.astype(np.float32) / 255 - mean) / std
        if self.random and np.random.default_rng((*seed, 1)).random() < 0.5:
            values = values[:, ::-1]
        return np.ascontiguousarray(values.transpose(2, 0, 1))

    def _place(
        self, tall: int, wide: int, rng: np.random.Generator
    ) -> tuple[tuple[slice, slice], Box]:
        """Return which part of the result an image of `tall` x `wide` fills, and with what of it.

        What is cut off is never enlarged before: images of odd proportions take no more memory.
        """
        height, width = self.size
        whole = (slice(0, height), slice(0, width))
        if self.fit == "stretch":
            return whole, (0.0, 0.0, float(wide), float(tall))
        ratios = (height / tall, width / wide)
        if self.fit == "pad":
            scale = min(ratios)
            rows, columns = (max(1, round(n * scale)) for n in (tall, wide))
            top, left = (height - rows) // 2, (width - columns) // 2
            part = (slice(top, top + rows), slice(left, left + columns))
            return part, (0.0, 0.0, float(wide), float(tall))
        scale = max(ratios) * (rng.uniform(1, self.zoom) if self.random else 1)
        rows_cut, columns_cut = tall - height / scale, wide - width / scale
        down, right = rng.random(2) if self.random else (0.5, 0.5)
        top_cut, left_cut = max(0.0, rows_cut * down), max(0.0, columns_cut * right)
        box = (left_cut, top_cut, left_cut + width / scale, top_cut + height / scale)
        return whole, (box[0], box[1], min(box[2], float(wide)), min(box[3], float(tall)))
