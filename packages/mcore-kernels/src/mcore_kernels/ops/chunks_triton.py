"""What kernels over chunks of packed documents share, in Triton. Imported only by such kernels.

A document's chunks begin with it, so that its numbers do not depend on what it is packed with. Rows
behind the last document are dealt into chunks too, as document N, so that somebody writes their
zeros. Nothing is read back from a device: there are as many programs as any N documents in T rows
could need chunks.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import interpreted


@triton.jit
def _counts_kernel(ends_ptr, chunks_ptr, t, count, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """The number of the first chunk of each document, of rows of none, and of nothing."""
    done = tl.full((), 0, dtype=tl.int32)
    tl.store(chunks_ptr, done)
    for base in range(0, count + 1, BLOCK):
        document = base + tl.arange(0, BLOCK)
        start = tl.load(ends_ptr + document, mask=document <= count, other=0)
        end = tl.load(ends_ptr + document + 1, mask=document < count, other=0)
        end = tl.where(document == count, t, end)
        needed = ((end - start + LENGTH - 1) // LENGTH).to(tl.int32)
        needed = tl.where(document <= count, needed, 0)
        tl.store(
            chunks_ptr + 1 + document, done + tl.cumsum(needed, axis=0), mask=document <= count
        )
        done += tl.sum(needed, axis=0)


@triton.jit
def chunk_rows(chunk, ends_ptr, chunks_ptr, t, count, halvings, LENGTH: tl.constexpr):
    """Whether chunk is one of a document, its first row, and the row behind its last."""
    low = tl.full((), 0, dtype=tl.int32)
    high = low + count + 1
    for _ in range(halvings):
        middle = (low + high) // 2
        behind = (low < high) & (tl.load(chunks_ptr + 1 + middle, mask=low < high) <= chunk)
        low = tl.where(behind, middle + 1, low)
        high = tl.where(behind, high, middle)
    start = tl.load(ends_ptr + low, mask=low <= count, other=0).to(tl.int64)
    end = tl.load(ends_ptr + low + 1, mask=low < count, other=0).to(tl.int64)
    end = tl.where(low == count, t, end)
    first = start + (chunk - tl.load(chunks_ptr + low)) * LENGTH
    return low < count, first, tl.minimum(first + LENGTH, end)


@triton.jit
def keep_sums(total_ptr, size, at, total, mask, PAIR: tl.constexpr):
    """Store sums of logarithms in float32; PAIR: and what that does not hold, `size` further on.

    Differences of sums cancel: they are summed in float64.
    """
    short = total.to(tl.float32)
    tl.store(total_ptr + at, short, mask=mask)
    if PAIR:
        tl.store(total_ptr + size + at, (total - short.to(tl.float64)).to(tl.float32), mask=mask)


@triton.jit
def sums(total_ptr, size, at, live, PAIR: tl.constexpr):
    """Sums at `at`, and what float32 does not hold of them.

    Rows behind a chunk's last are read as that one, so that no later sum is above an earlier one.
    """
    total = tl.load(total_ptr + at, mask=live, other=0.0)
    rest = total
    if PAIR:
        rest = tl.load(total_ptr + size + at, mask=live, other=0.0)
    return total, rest


@triton.jit
def between(total, rest, since, since_rest, PAIR: tl.constexpr):
    """exp(sum - earlier sum)."""
    exponent = total - since
    if PAIR:
        exponent += rest - since_rest
    return tl.exp(exponent)


@triton.jit
def tile(ptr, i, stride, at_i, j, at_j):
    """Numbers at rows i and columns j, [i, j]; zeros outside.

    i and j count from ptr, so that 32 bits hold them: places of 64 take a kernel's registers.
    """
    at = ptr + i[:, None] * stride + j[None, :]
    return tl.load(at, mask=at_i[:, None] & at_j[None, :], other=0.0)


@triton.jit
def tile_across(ptr, i, stride, at_i, j, at_j):
    """The same as [j, i]."""
    at = ptr + i[None, :] * stride + j[:, None]
    return tl.load(at, mask=at_i[None, :] & at_j[:, None], other=0.0)


@triton.jit
def keep_tile(ptr, i, stride, at_i, j, at_j, x):
    """Store x [i, j] in the dtype that lies there."""
    at = ptr + i[:, None] * stride + j[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=at_i[:, None] & at_j[None, :])


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """total + a b, of matrices that have one dtype."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """Documents dealt into chunks of `length` rows.

    ends [N+1] bounds the documents in `rows` rows; first [N+2] is the number of the first chunk of
    each, of rows of none and of what lies behind them; `most` is how many there can be.
    """

    length: int
    rows: int
    ends: Tensor
    first: Tensor
    most: int

    @staticmethod
    def of(ends: Tensor, rows: int, length: int) -> Chunks:
        """Deal the rows; one launch."""
        count = ends.shape[0] - 1
        first = torch.empty(count + 2, dtype=torch.int32, device=ends.device)
        _counts_kernel[(1,)](ends, first, rows, count, LENGTH=length, BLOCK=256)
        most = (rows + (count + 1) * (length - 1)) // length
        return Chunks(length=length, rows=rows, ends=ends, first=first, most=most)

    def arguments(self) -> tuple[Tensor, Tensor, int, int, int]:
        """What `chunk_rows` takes after the chunk's number."""
        documents = self.ends.shape[0] - 1
        return self.ends, self.first, self.rows, documents, (documents + 1).bit_length()


def chunk_length(most: int, state: int, limits: tuple[int, int]) -> int:
    """Rows of a chunk: a power of two, as many as asked for, needed, and good for the kernel.

    most: what suits states of up to 128 numbers to a row; with `state` of them, fewer.
    limits: rows asked for, and of the longest document.
    """
    most = min(most, max(16, 128 * most // padded(state)))
    return min(most, *(max(16, triton.next_power_of_2(n)) for n in limits))


def of_dtype(kernel: str, x: Tensor) -> str:
    """The name of a kernel's launch parameters: those of float32 are others."""
    return f"{kernel}_float32" if x.dtype == torch.float32 else kernel


def padded(size: int) -> int:
    """The size of a block that holds `size` numbers and that matrix units take."""
    return max(16, triton.next_power_of_2(size))


def matrix_options(x: Tensor) -> dict[str, object]:
    """`PRECISION` and `WIDEN` of `product`; float32 is multiplied as such."""
    widen = interpreted(x)
    exact = widen or x.dtype == torch.float32
    return {"PRECISION": "ieee" if exact else "tf32", "WIDEN": widen}


def lying(x: Tensor) -> Tensor:
    """x with neighbouring numbers in its last dimension; copied only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
