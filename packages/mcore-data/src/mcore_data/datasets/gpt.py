"""Samples for language-model training: documents joined, cut to one length, shuffled.

S: tokens of a sample (`seq_length`).
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mcore_data.datasets.cache import cached_arrays, content_key
from mcore_data.datasets.gpt_index import GPTIndex, as_numbers, build_gpt_index
from mcore_data.datasets.sample import Sample, segment_bounds, segment_positions
from mcore_data.datasets.splits import document_ranges
from mcore_data.indexed import IndexedReader

_INDEX_VERSION = 1


class GPTDataset:
    """Samples of `seq_length` tokens from the documents of an indexed file.

    `len(dataset)` may exceed `num_samples`: the last epoch is finished. The order of samples is
    a function of the lengths of the documents and the arguments alone.

    Args:
        reader: the tokens.
        documents: sequence numbers to use (default: all).
        seq_length: tokens of a sample.
        num_samples: how many samples are needed, by as many epochs as that takes; None: one
            epoch.
        seed: seed of both shuffles.
        eod_id: id of the token that ends a document; needed by the four options on documents.
        pad_id: id that fills a short last sample (default 0); see `drop_last`.
        reset_positions: count positions from 0 in every document.
        reset_attention: make every document a segment of its own in `cu_seqlens`.
        mask_eod_loss: leave out of the loss the positions whose label is the EOD token.
        mask_after_eod: leave out of the loss the positions whose input is the EOD token and
            whose label starts an unrelated document (Megatron-LM's `eod_mask_loss`).
        extra_token: read S + 1 tokens per sample, so that the last position has a label too;
            otherwise its loss mask is 0.
        drop_last: leave out a last sample that is shorter than S; otherwise it is filled with
            `pad_id`, and the filled positions are masked by count, whatever their id.
        cache_dir: keep the index arrays here, named by the hash of what they depend on, and
            map them; None: build in memory.

    Raises:
        ValueError: no sample fits, or an option needs `eod_id` and it is None.

    """

    def __init__(
        self,
        reader: IndexedReader,
        documents: range | ArrayLike | None = None,
        *,
        seq_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        eod_id: int | None = None,
        pad_id: int | None = None,
        reset_positions: bool = False,
        reset_attention: bool = False,
        mask_eod_loss: bool = False,
        mask_after_eod: bool = False,
        extra_token: bool = True,
        drop_last: bool = True,
        cache_dir: str | Path | None = None,
    ) -> None:
        asked = {
            "reset_positions": reset_positions,
            "reset_attention": reset_attention,
            "mask_eod_loss": mask_eod_loss,
            "mask_after_eod": mask_after_eod,
        }
        if eod_id is None and any(asked.values()):
            names = ", ".join(name for name, value in asked.items() if value)
            raise ValueError(f"{names} needs eod_id, which is None")
        if not drop_last and pad_id is not None and pad_id == eod_id:
            warnings.warn(
                f"pad_id and eod_id are both {pad_id}: padding is masked by its count, and "
                f"genuine tokens {eod_id} keep their loss",
                stacklevel=2,
            )
        self.reader = reader
        self.seq_length = seq_length
        self.eod_id = eod_id
        self.pad_id = 0 if pad_id is None else pad_id
        self.reset_positions = reset_positions
        self.reset_attention = reset_attention
        self.mask_eod_loss = mask_eod_loss
        self.mask_after_eod = mask_after_eod
        self.extra_token = extra_token
        self.index = self._build_index(documents, num_samples, seed, drop_last, cache_dir)

    def _build_index(
        self,
        documents: range | ArrayLike | None,
        num_samples: int | None,
        seed: int,
        drop_last: bool,
        cache_dir: str | Path | None,
    ) -> GPTIndex:
        count = len(self.reader)
        which = range(count) if documents is None else documents
        chosen = as_numbers(which, np.int32)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= count):
            raise ValueError(
                f"{self.reader.prefix}: documents {chosen.min()} to {chosen.max()} asked for, "
                f"it has {count}"
            )
        parameters = {
            "seq_length": self.seq_length,
            "num_samples": num_samples,
            "seed": seed,
            "extra_token": self.extra_token,
            "drop_last": drop_last,
        }

        def build() -> dict[str, NDArray[Any]]:
            try:
                index = build_gpt_index(
                    self.reader.lengths,
                    which if isinstance(which, range) else chosen,
                    seq_length=self.seq_length,
                    num_samples=num_samples,
                    seed=seed,
                    extra_token=self.extra_token,
                    drop_last=drop_last,
                )
            except ValueError as error:
                raise ValueError(f"{self.reader.prefix}: {error}") from None
            return {
                "documents": index.documents,
                "samples": index.samples,
                "shuffle": index.shuffle,
            }

        if cache_dir is None:
            return GPTIndex(**build())
        key = content_key(
            {"kind": "gpt", "version": _INDEX_VERSION, **parameters},
            chosen,
            self.reader.lengths[chosen],
        )
        names = ("documents", "samples", "shuffle")
        return GPTIndex(**cached_arrays(Path(cache_dir), key, build, names))

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def text(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of sample `index` as stored, int64: S + 1 with the extra token.

        Only a kept short last sample has fewer.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.reader.prefix}: sample {index} of {len(self)}")
        row = int(self.index.shuffle[index])
        first, begin = (int(i) for i in self.index.samples[row])
        last, end = (int(i) for i in self.index.samples[row + 1])
        end += int(self.extra_token)
        documents = self.index.documents[first : last + 1].tolist()
        if first == last:
            return self.reader.get(documents[0], begin, end - begin).astype(np.int64)
        parts = [self.reader.get(documents[0], begin)]
        parts += [self.reader.get(document) for document in documents[1:-1]]
        parts.append(self.reader.get(documents[-1], 0, end))
        return np.concatenate(parts).astype(np.int64)

    def __getitem__(self, index: int) -> Sample:
        text = self.text(index)
        size = self.seq_length
        filled = np.full(size + 1, self.pad_id, np.int64)
        filled[: len(text)] = text
        tokens, labels = filled[:-1], filled[1:]
        loss_mask = np.zeros(size, np.float32)
        loss_mask[: len(text) - 1] = 1
        if self.mask_eod_loss:
            loss_mask[labels == self.eod_id] = 0
        if self.mask_after_eod:
            loss_mask[tokens == self.eod_id] = 0
        whole = np.array([0, size], np.int32)
        bounds = whole
        if self.eod_id is not None and (self.reset_positions or self.reset_attention):
            # Padding may look like an EOD: boundaries come from genuine tokens only.
            bounds = segment_bounds(text, self.eod_id, size)
        return Sample(
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            positions=segment_positions(bounds if self.reset_positions else whole),
            cu_seqlens=bounds if self.reset_attention else whole,
        )


def gpt_splits(
    reader: IndexedReader,
    split: str,
    num_samples: Sequence[int | None],
    *,
    seq_length: int,
    seed: int = 1234,
    **options: Any,
) -> tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]:
    """Return the training, validation and test datasets of one file.

    `split` as in `parse_split`; `num_samples` are three numbers of samples (None: one epoch,
    0: no dataset). A part without documents is None; `options` go to `GPTDataset`.
    """
    if len(num_samples) != 3:
        raise ValueError(f"num_samples has {len(num_samples)} entries, it takes 3")
    parts: list[GPTDataset | None] = []
    for documents, count in zip(document_ranges(split, len(reader)), num_samples, strict=True):
        if count == 0 or not documents:
            parts.append(None)
        else:
            parts.append(
                GPTDataset(
                    reader,
                    documents,
                    seq_length=seq_length,
                    num_samples=count,
                    seed=seed,
                    **options,
                )
            )
    training, validation, test = parts
    return training, validation, test
