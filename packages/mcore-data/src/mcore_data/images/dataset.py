"""Samples of an image and its text, for the loaders that serve every other kind.

S: tokens of a sample. C, H, W: channels, height and width. N, P: patches and their side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.sample import Sample
from mcore_data.images.patches import check_patch, patchify
from mcore_data.images.sources import ImageTextSource
from mcore_data.images.transform import ImageTransform
from mcore_data.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageTextSample(Sample):
    """A text of S tokens and its image.

    Attributes:
        image: float32 [C, H, W], or [N, C * P * P] as patches.
        in_patches: whether it is.

    """

    image: NDArray[np.float32]
    in_patches: bool

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """Return the image as `images`, or as `patches`."""
        return {"patches" if self.in_patches else "images": self.image}


class ImageTextDataset:
    """A sample for every pair of a source: the text is learned, the image is given.

    A sample is the same at every call: random crops depend on `seed` and the sample's number alone.
    With `BatchSampler` and `MicroBatchLoader` it is read by any number of ranks, and resumed at any
    sample.

    Args:
        source: the pairs.
        transform: makes images numbers of one size.
        tokenizer: makes texts ids; they begin with its BOS and end with its EOS, if it has them.
        seq_length: positions S of a sample; longer texts are cut, shorter ones filled up with
            positions that bear no loss.
        patch: side of the patches; None: images stay whole.
        seed: of random crops.
        views: samples of each pair, one after another, which differ in their random crops.

    Raises:
        ValueError: the image size is no multiple of the patch, or a number is below 1; from an
            access, with its place, when a pair cannot be read.

    """

    def __init__(
        self,
        source: ImageTextSource,
        transform: ImageTransform,
        *,
        tokenizer: Tokenizer,
        seq_length: int,
        patch: int | None = None,
        seed: int = 0,
        views: int = 1,
    ) -> None:
        if seq_length < 1 or views < 1:
            raise ValueError(f"seq_length {seq_length} and views {views} must be at least 1")
        if views > 1 and not transform.random:
            raise ValueError(f"{views} views of a pair are all the same without random crops")
        if patch is not None:
            check_patch(transform.size, patch)
        self.source = source
        self.transform = transform
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.patch = patch
        self.seed = seed
        self.views = views

    def __len__(self) -> int:
        return len(self.source) * self.views

    def __getitem__(self, index: int) -> ImageTextSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        pair = self.source[index // self.views]
        image = self.transform(pair.image, seed=(self.seed % 2**64, index), where=pair.where)
        try:
            ids = self.tokenizer.encode(pair.text)
        except ValueError as error:
            raise ValueError(f"{pair.where}: {error}") from None
        first, last = self.tokenizer.bos_id, self.tokenizer.eos_id
        text = [*([] if first is None else [first]), *ids, *([] if last is None else [last])]
        return self._sample(np.array(text[: self.seq_length + 1], np.int64), image)

    def _sample(self, text: NDArray[np.int64], image: NDArray[np.float32]) -> ImageTextSample:
        size, used = self.seq_length, max(len(text) - 1, 0)
        # Without a padding id of its own any id will do: no position there bears loss.
        padding = self.tokenizer.pad_id or 0
        tokens, labels = (np.full(size, padding, np.int64) for _ in range(2))
        tokens[: min(len(text), size)] = text[:size]
        labels[:used] = text[1 : used + 1]
        places = np.arange(size, dtype=np.int64)
        bounds = sorted({0, used, size})
        return ImageTextSample(
            tokens=tokens,
            labels=labels,
            loss_mask=(places < used).astype(np.float32),
            positions=np.where(places < used, places, places - used),
            cu_seqlens=np.array(bounds, np.int32),
            image=image if self.patch is None else patchify(image, self.patch),
            in_patches=self.patch is not None,
        )
