"""Images with text: tar files and JSON lines as sources, pixels and patches as samples."""

from mcore_data.images.dataset import ImageTextDataset, ImageTextSample
from mcore_data.images.patches import patchify, unpatchify
from mcore_data.images.sources import ImageText, ImageTextSource, JsonlImages, TarImages
from mcore_data.images.transform import ImageTransform

__all__ = [
    "ImageText",
    "ImageTextDataset",
    "ImageTextSample",
    "ImageTextSource",
    "ImageTransform",
    "JsonlImages",
    "TarImages",
    "patchify",
    "unpatchify",
]
