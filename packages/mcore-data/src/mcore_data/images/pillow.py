"""Reading and resizing of images, through the library Pillow (extra `images`)."""

import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps


def open_rgb(raw: bytes, where: str) -> Image.Image:
    """Return an image upright and in colour, what is transparent on white.

    ValueError, with `where`, when it is none, is damaged or has too many pixels to be meant.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.simplefilter("ignore", UserWarning)
            picture = ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))
            assert picture is not None
            if picture.mode.startswith("I;16"):  # the library would clip it at 255
                picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            elif picture.mode in ("I", "F"):
                raise ValueError(f"mode {picture.mode}, whose numbers have no full white")
            if picture.has_transparency_data:
                layer = picture.convert("RGBA")
                picture = Image.new("RGBA", layer.size, "white")
                picture.alpha_composite(layer)
            return picture.convert("RGB")
    except Exception as error:  # a decoder for each format, and each has errors of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{where}: no image that can be read ({reason})") from None


def resized(
    picture: Image.Image, height: int, width: int, box: tuple[float, float, float, float]
) -> NDArray[np.uint8]:
    """Return a part of an image as pixels [height, width, 3], by bicubic interpolation.

    `box`: left, top, right and bottom of the part.
    """
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC, box))
