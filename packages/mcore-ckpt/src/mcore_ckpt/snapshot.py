"""A copy of local tensors in host memory, taken while training waits, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mcore_parallel.layout import LayoutTensor


class HostMemory:
    """Host buffers for one snapshot, kept from one to the next: pinned where tensors are on GPUs.

    Pinning memory takes longer than copying into it, and fresh pages have to be touched first.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, tensors: Mapping[str, LayoutTensor]) -> dict[str, LayoutTensor]:
        """Return copies of the tensors, by the same keys, as they are when this returns.

        They are overwritten by the next call. From GPUs, all copies are under way at once, and what
        the current streams were doing with the tensors comes first.
        """
        self._buffers = {key: held for key, held in self._buffers.items() if key in tensors}
        streams = set()
        with torch.no_grad():
            for key, value in tensors.items():
                source = value.tensor.detach()
                if source.is_cuda:
                    streams.add(torch.cuda.current_stream(source.device))
                self._buffer(key, source).copy_(source, non_blocking=source.is_cuda)
        for stream in streams:
            stream.synchronize()
        return {
            key: LayoutTensor(self._buffers[key], value.layout) for key, value in tensors.items()
        }

    def _buffer(self, key: str, source: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            self._buffers.pop(key, None)  # gives its memory back first
            buffer = torch.empty(
                source.shape, dtype=source.dtype, pin_memory=source.is_cuda and source.numel() > 0
            )
            self._buffers[key] = buffer
        return buffer
