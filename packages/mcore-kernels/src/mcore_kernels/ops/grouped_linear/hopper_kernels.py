"""The weight gradient of experts on Hopper, in Gluon: warps that load beside warps that multiply.

One persistent kernel. A warp takes the next tile from a counter (experts have unlike numbers of
rows, so that a fixed share would leave processors idle), says which it is, and has the memory unit
load the tile's rows of both operands, stage after stage; eight warps multiply, and hand their sums
to the memory unit, which writes them or adds them where the buffer lies. Meanwhile the loads for
the next tile go on.

Shapes: R rows sorted by expert, E experts, buffer [E × N_OUT, N_IN]; a tile is BM × BN of one
expert, and each step takes BK rows.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.7 has renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def _add_to_global(desc, coord, source, _semantic=None):
    """Add a tile in shared memory to one in global memory, asynchronously, as stores are."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, source.handle)


@gluon.jit
def _rows(ends_ptr, expert):
    end = gl.load(ends_ptr + expert)
    start = gl.load(ends_ptr + gl.maximum(expert - 1, 0))
    if expert == 0:
        start = 0
    return start, end


@gluon.jit
def _put(out, row, column, part, buffer, ADD: gl.constexpr, BUFFERS: gl.constexpr):
    # What was put from this buffer before has been read.
    tma.store_wait(BUFFERS - 1)
    barrier()
    buffer.store(part)
    fence_async_shared()
    barrier()
    if ADD:
        _add_to_global(out, [row, column], buffer)
    else:
        tma.async_copy_shared_to_global(out, [row, column], buffer)


@gluon.jit
def put_all(
    out, row, column, total, buffers, AT: gl.constexpr, ADD: gl.constexpr, WIDTH: gl.constexpr
):
    """Put a tile in parts of a buffer's width, from the left."""
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    if COLUMNS == WIDTH:
        BUFFERS: gl.constexpr = buffers.shape[0]
        _put(out, row, column, total, buffers.index(AT % BUFFERS), ADD, BUFFERS)
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = total.reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()
        put_all(out, row, column, left, buffers, AT, ADD, WIDTH)
        put_all(out, row, column + HALF, right, buffers, AT + HALF // WIDTH, ADD, WIDTH)


@gluon.jit
def _keep_rows(stage, left, WARPS: gl.constexpr):
    """Zero rows of the next expert, which were loaded with the last of this one."""
    ROWS: gl.constexpr = stage.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    values = stage.load(layout)
    stage.store(gl.where(row < left, values, 0.0).to(values.dtype))


@gluon.jit
def _multiply(
    out,
    dy_stages,
    x_stages,
    buffers,
    full,
    empty,
    tiles,
    tile_full,
    tile_empty,
    ends_ptr,
    experts,
    n_out,
    n_in,
    BM: gl.constexpr,
    BN: gl.constexpr,
    ADD: gl.constexpr,
    WARPS: gl.constexpr,
):
    STAGES: gl.constexpr = x_stages.shape[0]
    BK: gl.constexpr = x_stages.shape[1]
    WIDTH: gl.constexpr = buffers.shape[2]
    SLOTS: gl.constexpr = tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    across = gl.cdiv(n_in, BN)
    of_expert = gl.cdiv(n_out, BM) * across
    step = 0
    taken = 0
    mbarrier.wait(tile_full.index(0), 0)
    tile = gl.sum(tiles.index(0).load(one), 0)
    while tile < of_expert * experts:
        mbarrier.arrive(tile_empty.index(taken % SLOTS), count=1)
        expert = tile // of_expert
        start, end = _rows(ends_ptr, expert)
        total = gl.zeros((BM, BN), gl.float32, layout)
        steps = gl.cdiv(end - start, BK)
        for i in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            dy = dy_stages.index(stage)
            x = x_stages.index(stage)
            left = end - start - i * BK
            if left < BK:
                _keep_rows(dy, left, WARPS)
                _keep_rows(x, left, WARPS)
                fence_async_shared()
                barrier()
            total = warpgroup_mma(dy.permute((1, 0)), x, total, is_async=True)
            # The product before this one is over, and its stage free.
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
            step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=steps > 0)
        if (not ADD) or steps > 0:
            local = tile % of_expert
            row = expert * n_out + local // across * BM
            put_all(out, row, local % across * BN, total, buffers, 0, ADD, WIDTH)
        taken += 1
        mbarrier.wait(tile_full.index(taken % SLOTS), (taken // SLOTS) & 1)
        tile = gl.sum(tiles.index(taken % SLOTS).load(one), 0)
    tma.store_wait(0)


@gluon.jit
def _load(
    dy,
    x,
    dy_stages,
    x_stages,
    full,
    empty,
    tiles,
    tile_full,
    tile_empty,
    next_ptr,
    ends_ptr,
    experts,
    n_out,
    n_in,
    BM: gl.constexpr,
    BN: gl.constexpr,
):
    STAGES: gl.constexpr = x_stages.shape[0]
    BK: gl.constexpr = x_stages.shape[1]
    SLOTS: gl.constexpr = tiles.shape[0]
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    across = gl.cdiv(n_in, BN)
    of_expert = gl.cdiv(n_out, BM) * across
    step = 0
    taken = 0
    tile = 0
    while tile < of_expert * experts:
        tile = gl.atomic_add(next_ptr, 1, sem="relaxed")
        slot = taken % SLOTS
        mbarrier.wait(tile_empty.index(slot), ((taken // SLOTS) & 1) ^ 1)
        tiles.index(slot).store(gl.full([1], tile, gl.int32, one))
        mbarrier.arrive(tile_full.index(slot), count=1)
        taken += 1
        if tile < of_expert * experts:
            expert = tile // of_expert
            start, end = _rows(ends_ptr, expert)
            local = tile % of_expert
            of_out = local // across * BM
            of_in = local % across * BN
            for row in range(start, end, BK):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(
                    full.index(stage), (BM + BN) * BK * dy.dtype.primitive_bitwidth // 8
                )
                at = full.index(stage)
                tma.async_copy_global_to_shared(dy, [row, of_out], at, dy_stages.index(stage))
                tma.async_copy_global_to_shared(x, [row, of_in], at, x_stages.index(stage))
                step += 1


@gluon.jit
def weight_grad_kernel(
    dy,
    x,
    out,
    next_ptr,
    ends_ptr,
    experts,
    n_out,
    n_in,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    ADD: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out_i += dy_iᵀ x_i, or out_i = dy_iᵀ x_i, for the rows i of each expert.

    `dy`, `x` and `out` are descriptors of the whole tensors, whose blocks are a step's rows and a
    buffer; `next_ptr` points to a zero; `ends_ptr` to where each expert's rows end.
    """
    BK: gl.constexpr = x.block_shape[0]
    BN: gl.constexpr = x.block_shape[1]
    BM: gl.constexpr = dy.block_shape[1]
    WIDTH: gl.constexpr = out.block_shape[1]
    SLOTS: gl.constexpr = 2
    dy_stages = gl.allocate_shared_memory(dy.dtype, [STAGES, BK, BM], dy.layout)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, BK, BN], x.layout)
    buffers = gl.allocate_shared_memory(gl.float32, [BUFFERS, BM, WIDTH], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], flat)
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
                    out, dy_stages, x_stages, buffers, full, empty, tiles, tile_full, tile_empty,
                    ends_ptr, experts, n_out, n_in, BM, BN, ADD, num_warps,
                ),
            ),
            (
                _load,
                (
                    dy, x, dy_stages, x_stages, full, empty, tiles, tile_full, tile_empty,
                    next_ptr, ends_ptr, experts, n_out, n_in, BM, BN,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
