"""Packing the pieces of a round into one buffer of bytes, with checksums where they are wanted."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from mcore_ckpt.live.rounds import Piece
from mcore_parallel.layout import Copy, Place

_ALIGN = 16  # bytes: every member's part starts where any dtype may
_CHECKSUM = 4  # bytes


class Staged:
    """Where the pieces of one direction of a round lie in a buffer: one part for each member.

    With checksums, a part ends with the CRC-32 of each of its pieces, in order.
    """

    def __init__(
        self, by_rank: Mapping[int, Sequence[Piece]], ranks: Sequence[int], checksums: bool
    ) -> None:
        self.slots: list[tuple[Piece, int, int]] = []  # piece, its start, its checksum's start
        self.sizes: list[int] = []
        end = 0
        for rank in ranks:
            begin = end
            starts = []
            pieces = by_rank.get(rank, ())
            for piece in pieces:
                end = _rounded(end, piece.dtype.itemsize)
                starts.append(end)
                end += piece.num_bytes
            for piece, start in zip(pieces, starts, strict=True):
                self.slots.append((piece, start, end if checksums else -1))
                end += _CHECKSUM if checksums else 0
            end = _rounded(end, _ALIGN)
            self.sizes.append(end - begin)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return sum(self.sizes)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
        """Yield each piece with its elements in the buffer, in the shape of its copy, and its sum.

        The sum is the four bytes of its checksum (none without checksums).
        """
        for piece, start, at in self.slots:
            raw = buffer[start : start + piece.num_bytes]
            elements = raw.view(piece.dtype).view(piece.copy.shape)
            yield piece, elements, buffer[at : at + _CHECKSUM] if at >= 0 else buffer[:0]


def view(tensors: Mapping[str, torch.Tensor], place: Place, copy: Copy) -> torch.Tensor:
    """Return the elements of one end of a copy as a view of the local tensor."""
    tensor = tensors[place.key].detach()
    return tensor.as_strided(copy.shape, place.strides, int(tensor.storage_offset()) + place.offset)


def checksum(elements: torch.Tensor) -> torch.Tensor:
    """Return the CRC-32 of a tensor's bytes as four bytes."""
    crc = zlib.crc32(as_bytes(elements).cpu().numpy().data)
    return torch.tensor(list(crc.to_bytes(_CHECKSUM, "little")), dtype=torch.uint8)


def as_bytes(elements: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, copied, as uint8 of one dimension."""
    # `contiguous` would leave odd strides of dimensions of size 1, which cannot be viewed as bytes.
    copied = torch.empty(elements.numel(), dtype=elements.dtype, device=elements.device)
    copied.view(elements.shape).copy_(elements)
    return copied.view(torch.uint8)


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
