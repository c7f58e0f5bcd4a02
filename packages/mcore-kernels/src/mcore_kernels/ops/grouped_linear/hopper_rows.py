"""Rows times their experts' weights on Hopper, in Gluon: the kernel of results and input gradients.

As in `hopper_kernels`, one warp takes tiles from a counter and has the memory unit load them, eight
multiply. Which rows and columns a tile has is passed on with it, because only who walks over the
experts in their order knows.

Shapes: x [R, K] sorted by expert, E experts, y [R, N]; a tile is BM × BN rows and columns of one
expert, and each step takes BK of K. The weights are [E × N, K] (`K_LAST`) or [E × K, N].
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mcore_kernels.ops.grouped_linear.hopper_kernels import barrier, put_all


@gluon.jit
def _multiply(
    y,
    y_ptr,
    x_stages,
    w_stages,
    buffers,
    full,
    empty,
    tiles,
    tile_full,
    tile_empty,
    n,
    k,
    BM: gl.constexpr,
    BN: gl.constexpr,
    K_LAST: gl.constexpr,
    WARPS: gl.constexpr,
):
    STAGES: gl.constexpr = x_stages.shape[0]
    BK: gl.constexpr = x_stages.shape[2]
    WIDTH: gl.constexpr = buffers.shape[2]
    SLOTS: gl.constexpr = tile_full.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    steps = gl.cdiv(k, BK)
    step = 0
    taken = 0
    mbarrier.wait(tile_full.index(0), 0)
    row = gl.sum(tiles.index(0).load(one), 0)
    end = gl.sum(tiles.index(1).load(one), 0)
    column = gl.sum(tiles.index(2).load(one), 0)
    while row < end:
        mbarrier.arrive(tile_empty.index(taken % SLOTS), count=1)
        total = gl.zeros((BM, BN), gl.float32, layout)
        for i in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            w = w_stages.index(stage)
            if K_LAST:
                w = w.permute((1, 0))
            total = warpgroup_mma(x_stages.index(stage), w, total, is_async=True)
            # The product before this one is over, and its stage free.
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
            step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        result = total.to(y.dtype)
        if row + BM <= end:
            put_all(y, row, column, result, buffers, 0, False, WIDTH)
        else:
            # The rows after the expert's last are another's.
            rows = row + gl.arange(0, BM, gl.SliceLayout(1, layout))[:, None]
            columns = column + gl.arange(0, BN, gl.SliceLayout(0, layout))[None, :]
            at = y_ptr + rows.to(gl.int64) * n + columns
            gl.store(at, result, mask=(rows < end) & (columns < n))
        taken += 1
        mbarrier.wait(tile_full.index(taken % SLOTS), (taken // SLOTS) & 1)
        first = taken % SLOTS * 4
        row = gl.sum(tiles.index(first).load(one), 0)
        end = gl.sum(tiles.index(first + 1).load(one), 0)
        column = gl.sum(tiles.index(first + 2).load(one), 0)
    tma.store_wait(0)


@gluon.jit
def _load(
    x,
    w,
    x_stages,
    w_stages,
    full,
    empty,
    tiles,
    tile_full,
    tile_empty,
    next_ptr,
    ends_ptr,
    experts,
    n,
    k,
    BM: gl.constexpr,
    BN: gl.constexpr,
    K_LAST: gl.constexpr,
):
    STAGES: gl.constexpr = x_stages.shape[0]
    BK: gl.constexpr = x_stages.shape[2]
    SLOTS: gl.constexpr = tile_full.shape[0]
    BYTES: gl.constexpr = (BM + BN) * BK * x.dtype.primitive_bitwidth // 8
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    across = gl.cdiv(n, BN)
    step = 0
    taken = 0
    expert = 0
    # Tiles of the experts before this one, and where its rows lie.
    before = 0
    start = 0
    end = gl.load(ends_ptr)
    while expert < experts:
        tile = gl.atomic_add(next_ptr, 1, sem="relaxed")
        own = (end - start + BM - 1) // BM * across
        while (expert < experts) & (tile >= before + own):
            before += own
            start = end
            expert += 1
            end = gl.load(ends_ptr + gl.minimum(expert, experts - 1))
            own = (end - start + BM - 1) // BM * across
        # Neighbours have the same columns of the weight. None are left: no rows.
        down = gl.maximum((end - start + BM - 1) // BM, 1)
        row = start + (tile - before) % down * BM
        column = (tile - before) // down * BN
        slot = taken % SLOTS
        mbarrier.wait(tile_empty.index(slot), ((taken // SLOTS) & 1) ^ 1)
        last = gl.where(expert < experts, end, 0)
        tiles.index(slot * 4).store(gl.full([1], row, gl.int32, one))
        tiles.index(slot * 4 + 1).store(gl.full([1], last, gl.int32, one))
        tiles.index(slot * 4 + 2).store(gl.full([1], column, gl.int32, one))
        mbarrier.arrive(tile_full.index(slot), count=1)
        taken += 1
        if expert < experts:
            for inner in range(0, k, BK):
                stage = step % STAGES
                at = full.index(stage)
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(at, BYTES)
                tma.async_copy_global_to_shared(x, [row, inner], at, x_stages.index(stage))
                if K_LAST:
                    of_weight = [expert * n + column, inner]
                else:
                    of_weight = [expert * k + inner, column]
                tma.async_copy_global_to_shared(w, of_weight, at, w_stages.index(stage))
                step += 1


@gluon.jit
def rows_kernel(
    x,
    w,
    y,
    y_ptr,
    next_ptr,
    ends_ptr,
    experts,
    n,
    k,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    K_LAST: gl.constexpr,
    num_warps: gl.constexpr,
):
    """y_i = x_i w_i for the rows i of each expert.

    `x`, `w` and `y` are descriptors of the whole tensors, whose blocks are a step's part of a tile,
    and a buffer; `y_ptr` points to y, `next_ptr` to a zero, `ends_ptr` to where each expert's rows
    end.
    """
    BM: gl.constexpr = x.block_shape[0]
    BK: gl.constexpr = x.block_shape[1]
    BN: gl.constexpr = w.block_shape[0 if K_LAST else 1]
    SLOTS: gl.constexpr = 2
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    w_stages = gl.allocate_shared_memory(
        w.dtype, [STAGES, BN, BK] if K_LAST else [STAGES, BK, BN], w.layout
    )
    buffers = gl.allocate_shared_memory(y.dtype, [BUFFERS, BM, y.block_shape[1]], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Of each slot: the first row, where the expert's rows end, the first column.
    tiles = gl.allocate_shared_memory(gl.int32, [SLOTS * 4, 1], flat)
    tile_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    y, y_ptr, x_stages, w_stages, buffers, full, empty, tiles, tile_full,
                    tile_empty, n, k, BM, BN, K_LAST, num_warps,
                ),
            ),
            (
                _load,
                (
                    x, w, x_stages, w_stages, full, empty, tiles, tile_full, tile_empty, next_ptr,
                    ends_ptr, experts, n, k, BM, BN, K_LAST,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
