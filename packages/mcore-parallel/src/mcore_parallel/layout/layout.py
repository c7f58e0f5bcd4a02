"""`TensorLayout`: where the elements of a local tensor lie in named global tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mcore_parallel.layout.box import Box, row_major_strides
from mcore_parallel.layout.fragment import Fragment, local_motions


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """The fragments of a contiguous local tensor of `shape`.

    Local elements that no fragment covers are padding: zero, never saved, never counted.
    Fragments of one layout may not share local elements; that global tensors are tiled exactly is
    a property of all ranks together and checked by `check_tiling`.
    """

    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]

    def __post_init__(self) -> None:
        if self.shape and min(self.shape) < 0:
            raise ValueError(f"local shape {self.shape} must not be negative")
        size = self.numel
        for f in self.fragments:
            if f.box.numel and not (f.offset >= 0 and f.last < size):
                raise ValueError(
                    f"{f.name}: local addresses {f.offset}…{f.last} of box {f.box} leave the "
                    f"{size} elements of local shape {list(self.shape)}"
                )

    # --- construction -------------------------------------------------------------------------

    @staticmethod
    def whole(name: str, shape: Sequence[int]) -> TensorLayout:
        """Return the layout of a local tensor that is all of the global tensor `name`."""
        return TensorLayout.box(name, shape, Box.whole(shape))

    @staticmethod
    def box(name: str, global_shape: Sequence[int], box: Box) -> TensorLayout:
        """Return the layout of a local tensor (of shape `box.shape`) that is `box` of `name`.

        An empty box of a tensor that is not empty itself leaves no fragment.
        """
        fragment = Fragment(
            name=name,
            global_shape=tuple(global_shape),
            box=box,
            offset=0,
            strides=row_major_strides(box.shape),
        )
        keep = box.numel > 0 or not math.prod(global_shape)
        return TensorLayout(shape=box.shape, fragments=(fragment,) if keep else ())

    @staticmethod
    def padding(shape: Sequence[int]) -> TensorLayout:
        """Return the layout of a local tensor that holds nothing but padding."""
        return TensorLayout(shape=tuple(shape), fragments=())

    @staticmethod
    def concat(parts: Sequence[TensorLayout], dim: int = 0) -> TensorLayout:
        """Return the layout of the concatenation of the parts' local tensors along `dim`.

        Raises:
            ValueError: the parts' shapes differ elsewhere than along `dim`.
        """
        if not parts:
            raise ValueError("concat needs at least one layout")
        dim = _checked_dim(dim, parts[0].shape)
        first = parts[0].shape
        for part in parts:
            if (*part.shape[:dim], *part.shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]):
                raise ValueError(
                    f"local shapes {list(first)} and {list(part.shape)} differ elsewhere than "
                    f"along dimension {dim}"
                )
        shape = (*first[:dim], sum(part.shape[dim] for part in parts), *first[dim + 1 :])
        strides = row_major_strides(shape)
        fragments: list[Fragment] = []
        row = 0
        for part in parts:
            fragments += part._placed(row * strides[dim], strides)
            row += part.shape[dim]
        return TensorLayout(shape=shape, fragments=tuple(fragments))

    @staticmethod
    def interleaved(
        parts: Sequence[TensorLayout], block_sizes: Sequence[int], dim: int = 0
    ) -> TensorLayout:
        """Return the layout of the parts taken in turn, `block_sizes[i]` rows of part i at a time.

        With block sizes 1 and 1 that is gate and up row by row; with the query rows of one group,
        one key head and one value head it is a fused weight grouped by kv head.

        Raises:
            ValueError: the parts do not hold the same number of blocks along `dim`.
        """
        if len(parts) != len(block_sizes) or not parts:
            raise ValueError(f"{len(parts)} layouts need as many block sizes, not {block_sizes}")
        dim = _checked_dim(dim, parts[0].shape)
        count = parts[0].shape[dim] // max(block_sizes[0], 1)
        if any(
            size < 1 or p.shape[dim] != count * size
            for p, size in zip(parts, block_sizes, strict=True)
        ):
            raise ValueError(
                f"sizes {[p.shape[dim] for p in parts]} along dimension {dim} are not one number "
                f"of blocks of {list(block_sizes)}"
            )
        blocks = [
            p.reshaped((*p.shape[:dim], count, size, *p.shape[dim + 1 :]))
            for p, size in zip(parts, block_sizes, strict=True)
        ]
        joined = TensorLayout.concat(blocks, dim + 1)
        first = parts[0].shape
        return joined.reshaped((*first[:dim], count * sum(block_sizes), *first[dim + 1 :]))

    # --- reading ------------------------------------------------------------------------------

    @property
    def numel(self) -> int:
        """Number of local elements, padding included."""
        return math.prod(self.shape)

    @property
    def covered(self) -> int:
        """Number of local elements that some fragment covers (all but the padding)."""
        return sum(fragment.box.numel for fragment in self.fragments)

    def names(self) -> tuple[str, ...]:
        """Return the names of the global tensors held, each once, in the order of fragments."""
        return tuple(dict.fromkeys(fragment.name for fragment in self.fragments))

    def views(self, local: torch.Tensor) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """Yield each fragment with the view of `local` that has its box's shape and order.

        The views share storage with `local` and carry no autograd history: writing them writes it.

        Raises:
            ValueError: `local` is not contiguous or not of this layout's shape.
        """
        if tuple(local.shape) != self.shape:
            raise ValueError(
                f"tensor of shape {list(local.shape)} for a layout of shape {list(self.shape)}"
            )
        if not local.is_contiguous():
            raise ValueError(f"a layout needs contiguous storage, not strides {local.stride()}")
        local = local.detach()
        base = int(local.storage_offset())
        for f in self.fragments:
            yield f, local.as_strided(f.box.shape, f.strides, base + f.offset)

    # --- deriving -----------------------------------------------------------------------------

    def flat_range(self, start: int, stop: int) -> TensorLayout:
        """Return the layout of the 1-D slice `[start, stop)` of the flattened local tensor."""
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"flat range {start}:{stop} leaves the {self.numel} local elements")
        fragments: list[Fragment] = []
        for f in self.fragments:
            if not f.box.numel or f.last < start or f.offset >= stop:
                continue
            inside = f.within(f.strides, start - f.offset, stop - f.offset)
            fragments += (replace(piece, offset=piece.offset - start) for piece in inside)
        return TensorLayout(shape=(stop - start,), fragments=tuple(fragments))

    def slice(self, dim: int, start: int, stop: int) -> TensorLayout:
        """Return the layout of `local.narrow(dim, start, stop - start)`, made contiguous."""
        dim = _checked_dim(dim, self.shape)
        if not 0 <= start <= stop <= self.shape[dim]:
            raise ValueError(
                f"slice {start}:{stop} leaves the {self.shape[dim]} elements of dimension {dim}"
            )
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        if start == stop:
            return TensorLayout.padding(shape)
        strides = row_major_strides(shape)
        fragments: list[Fragment] = []
        for f in self.fragments:
            for motion in local_motions(f, self.shape):
                weights = [step[dim] for step in motion.steps]
                low = start - motion.origin[dim]
                moved = motion.placed(-start * strides[dim], strides)
                fragments += moved.within(weights, low, low + stop - start)
        return TensorLayout(shape=shape, fragments=tuple(fragments))

    def permuted(self, dims: Sequence[int]) -> TensorLayout:
        """Return the layout of `local.permute(dims)`, made contiguous."""
        dims = [_checked_dim(dim, self.shape) for dim in dims]
        if sorted(dims) != list(range(len(self.shape))):
            raise ValueError(f"{dims} is no permutation of the {len(self.shape)} dimensions")
        shape = tuple(self.shape[dim] for dim in dims)
        strides = dict(zip(dims, row_major_strides(shape), strict=True))
        placed = self._placed(0, [strides[i] for i in range(len(shape))])
        return TensorLayout(shape=shape, fragments=tuple(placed))

    def transposed(self, dim0: int = 0, dim1: int = 1) -> TensorLayout:
        """Return the layout of `local.transpose(dim0, dim1)`, made contiguous."""
        dims = list(range(len(self.shape)))
        dim0, dim1 = _checked_dim(dim0, self.shape), _checked_dim(dim1, self.shape)
        dims[dim0], dims[dim1] = dim1, dim0
        return self.permuted(dims)

    def reshaped(self, shape: Sequence[int]) -> TensorLayout:
        """Return the layout of `local.view(shape)`: same storage, same fragments."""
        if math.prod(shape) != self.numel:
            raise ValueError(f"local shape {list(self.shape)} does not reshape to {list(shape)}")
        return replace(self, shape=tuple(shape))

    def replicated(self, index: int, count: int) -> TensorLayout:
        """Return this layout on member `index` of one more replicating axis of `count` members."""
        if not 0 <= index < count:
            raise ValueError(f"replica index {index} must lie in 0…{count - 1}")
        return self._mapped(
            lambda f: replace(
                f, replica=f.replica * count + index, num_replicas=f.num_replicas * count
            )
        )

    def renamed(self, fn: Callable[[str], str]) -> TensorLayout:
        """Return this layout with every global name passed through `fn`."""
        return self._mapped(lambda f: replace(f, name=fn(f.name)))

    def primary(self) -> TensorLayout:
        """Return only the fragments that are replica 0: each global element on exactly one rank."""
        return replace(self, fragments=tuple(f for f in self.fragments if f.replica == 0))

    def _mapped(self, fn: Callable[[Fragment], Fragment]) -> TensorLayout:
        return replace(self, fragments=tuple(fn(fragment) for fragment in self.fragments))

    def _placed(self, offset: int, strides: Sequence[int]) -> Iterator[Fragment]:
        """Yield the fragments in a storage where local coordinate x lies at offset + x·strides."""
        for fragment in self.fragments:
            for motion in local_motions(fragment, self.shape):
                yield motion.placed(offset, strides)


@dataclass(frozen=True, slots=True)
class LayoutTensor:
    """A local tensor and the layout that says what it holds."""

    tensor: torch.Tensor
    layout: TensorLayout

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.layout.shape:
            raise ValueError(
                f"tensor of shape {list(self.tensor.shape)} for a layout of shape "
                f"{list(self.layout.shape)} ({', '.join(self.layout.names())})"
            )

    def views(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """Yield each fragment with its view of the tensor (see `TensorLayout.views`)."""
        return self.layout.views(self.tensor)


def _checked_dim(dim: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dimension {dim} of a local tensor of {len(shape)} dimensions")
    return dim % len(shape)
