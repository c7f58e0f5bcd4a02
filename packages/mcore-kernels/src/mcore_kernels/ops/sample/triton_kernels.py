"""Kernels of sampling, in Triton. Imported only by `triton.py` beside it.

With m the largest logit of a row, z its others and h the temperature, weights are
e = exp((z - m)/h) in float64, as in `reference.py`. All cuts keep a beginning of the entries in
their order by (-z, id): those above some logit, and the first few of those that equal it. Both are
found by halving the range of the logits' bits, which needs no sort, among candidates: entries so
near to m that what is kept must be among them. Nearness is counted in eighths of h, up to 32 h.

Shapes: N rows, V entries, in S splits.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,no-any-return"
# ruff: noqa: PLR0917, PLR0124 -- kernels take pointers by position; only NaN is not itself

from __future__ import annotations

import triton
import triton.language as tl

STEPS = tl.constexpr(256)
_OF_HEAT = tl.constexpr(8.0)
_TOP_P_TOLERANCE = tl.constexpr(1e-6)  # as the reference's


@triton.jit
def _number(value: tl.constexpr):
    return tl.full((), value, dtype=tl.float64)


@triton.jit
def _rule(
    row, size, heat_ptr, k_ptr, p_ptr, min_ptr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """Temperature, how many entries to keep, what share, and the least weight of one.

    A cold row keeps one.
    """
    heat = tl.load(heat_ptr + row).to(tl.float64)
    cold = heat == 0.0
    most = tl.cast(size, tl.int64)
    if TOP_K:
        given = tl.load(k_ptr + row).to(tl.int64)
        most = tl.where(given > 0, tl.minimum(given, most), most)
    share, least = _number(1.0), _number(0.0)
    if TOP_P:
        share = tl.where(cold, 1.0, tl.load(p_ptr + row).to(tl.float64))
    if MIN_P:
        least = tl.where(cold, 0.0, tl.load(min_ptr + row).to(tl.float64))
    return tl.where(cold, 1.0, heat), tl.where(cold, 1, most), share, least


@triton.jit
def _largest(largest_ptr, row, splits, SPLITS: tl.constexpr):
    """Whether the row has a distribution, and its largest logit."""
    at = tl.arange(0, SPLITS)
    of_splits = tl.load(largest_ptr + row * splits + at, mask=at < splits, other=-float("inf"))
    broken = (of_splits != of_splits) | (of_splits == float("inf"))
    finite = (of_splits > -float("inf")) & (of_splits < float("inf"))
    broken, finite = tl.max(broken.to(tl.int32), axis=0), tl.max(finite.to(tl.int32), axis=0)
    valid = (broken == 0) & (finite > 0)
    return valid, tl.where(valid, tl.max(of_splits, axis=0), 0.0)


@triton.jit
def _exponent(z, largest, heat, inside):
    """(z - m)/h, at most 0; -inf outside."""
    x = (z.to(tl.float64) - largest.to(tl.float64)) / heat
    return tl.where(inside, x, -float("inf"))


@triton.jit
def _distance(x):
    return tl.minimum(tl.maximum(x * -_OF_HEAT, 0.0), STEPS - 1.0).to(tl.int32)


@triton.jit
def _key(z):
    """An integer in the order of the floats: -0 is 0."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _of_key(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest_kernel(z_ptr, largest_ptr, size, stride, SPLIT: tl.constexpr):
    """The largest logit of a split, NaN where there is one."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = split * SPLIT + tl.arange(0, SPLIT)
    z = tl.load(z_ptr + row * stride + at, mask=at < size, other=-float("inf")).to(tl.float32)
    broken = tl.max((z != z).to(tl.int32), axis=0) > 0
    largest = tl.where(broken, float("nan"), tl.max(z, axis=0))
    tl.store(largest_ptr + row * tl.num_programs(1) + split, largest)


@triton.jit
def spread_kernel(
    z_ptr, largest_ptr, heat_ptr, sums_ptr, counts_ptr, size, stride,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The sum of a split's weights, and how many of its entries there are at each distance."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    valid, largest = _largest(largest_ptr, row, splits, SPLITS)
    heat = tl.load(heat_ptr + row).to(tl.float64)
    at = split * SPLIT + tl.arange(0, SPLIT)
    inside = (at < size) & valid
    z = tl.load(z_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    x = _exponent(z, largest, tl.where(heat == 0.0, 1.0, heat), inside)
    tl.store(sums_ptr + row * splits + split, tl.sum(tl.exp(x), axis=0))
    # Places beyond the last entry are counted as the farthest, of the last split alone.
    counts = tl.histogram(_distance(x), STEPS)
    tl.store(counts_ptr + (row * splits + split) * STEPS + tl.arange(0, STEPS), counts)


@triton.jit
def _whole(sums_ptr, row, splits, SPLITS: tl.constexpr):
    at = tl.arange(0, SPLITS)
    return tl.sum(tl.load(sums_ptr + row * splits + at, mask=at < splits, other=0.0), axis=0)


@triton.jit
def _reach(counts, whole, size, most, share, least):
    """The distance up to which entries can be kept, or decide what is."""
    steps = tl.arange(0, STEPS)
    of_most = tl.sum((tl.cumsum(counts, axis=0) < most).to(tl.int32), axis=0)
    # What lies behind a distance weighs at most as much as if it were as near as it can be.
    bound = counts.to(tl.float64) * tl.exp(steps.to(tl.float64) / -_OF_HEAT)
    behind = tl.cumsum(bound, axis=0, reverse=True) - bound
    spare = (1.0 - share) * whole * (1.0 - 1e-6)
    of_share = tl.sum((behind > spare).to(tl.int32), axis=0)
    of_share = tl.where(share < 1.0, of_share, STEPS - 1)
    of_least = 1.0 - tl.log(tl.maximum(least, 1e-300)) * _OF_HEAT
    of_least = tl.minimum(tl.maximum(of_least, 0.0), STEPS - 1.0).to(tl.int32)
    # The share is one of the weight of the `most` first, so that these have to be known.
    of_cut = tl.where(share < 1.0, of_most, tl.minimum(of_most, of_least))
    reach = tl.where(most < size, of_cut, tl.minimum(of_share, of_least))
    return tl.minimum(reach, STEPS - 1)


@triton.jit
def gather_kernel(
    z_ptr, largest_ptr, heat_ptr, k_ptr, p_ptr, min_ptr, sums_ptr, counts_ptr, near_ptr, id_ptr,
    number_ptr, size, stride, SPLIT: tl.constexpr, SPLITS: tl.constexpr, TOP_K: tl.constexpr,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """The candidates of a row side by side, in the order of their ids; none where nothing cuts."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    valid, largest = _largest(largest_ptr, row, splits, SPLITS)
    heat, most, share, least = _rule(
        row, size, heat_ptr, k_ptr, p_ptr, min_ptr, TOP_K, TOP_P, MIN_P
    )
    cut = valid & ((most < size) | (share < 1.0) | (least > 0.0))
    steps = tl.arange(0, STEPS)
    counts, earlier = tl.zeros((STEPS,), dtype=tl.int32), tl.zeros((STEPS,), dtype=tl.int32)
    for other in range(splits):
        of_split = tl.load(counts_ptr + (row * splits + other) * STEPS + steps)
        counts += of_split
        earlier += tl.where(other < split, of_split, 0)
    reach = _reach(counts, _whole(sums_ptr, row, splits, SPLITS), size, most, share, least)
    number = tl.minimum(tl.sum(tl.where(steps <= reach, counts, 0), axis=0), size)
    tl.store(number_ptr + row, tl.where(cut, number, 0), mask=split == 0)
    at = split * SPLIT + tl.arange(0, SPLIT)
    inside = (at < size) & cut
    z = tl.load(z_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    near = inside & (_distance(_exponent(z, largest, heat, inside)) <= reach)
    before = tl.sum(tl.where(steps <= reach, earlier, 0), axis=0)
    to = row * size + before + tl.cumsum(near.to(tl.int32), axis=0) - 1
    tl.store(near_ptr + to, z, mask=near)
    tl.store(id_ptr + to, at, mask=near)


@triton.jit
def _weight_above(near_ptr, number, key, largest, heat, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """What candidates above a key weigh, or how many there are; their least, and others' greatest.

    Keys are int64, so that every int32 has a neighbour.
    """
    found = _number(0.0)
    least, greatest = tl.full((), 2**31, dtype=tl.int64), tl.full((), -(2**31), dtype=tl.int64)
    for base in range(0, number, BLOCK):
        at = base + tl.arange(0, BLOCK)
        inside = at < number
        z = tl.load(near_ptr + at, mask=inside, other=0.0)
        keys = _key(z).to(tl.int64)
        above = inside & (keys > key)
        if WEIGH:
            found += tl.sum(tl.exp(_exponent(z, largest, heat, above)), axis=0)
        else:
            found += tl.sum(above.to(tl.int32), axis=0)
        least = tl.minimum(least, tl.min(tl.where(above, keys, 2**31), axis=0))
        below = inside & (keys <= key)
        greatest = tl.maximum(greatest, tl.max(tl.where(below, keys, -(2**31)), axis=0))
    return found, least, greatest


@triton.jit
def _halved(
    near_ptr, number, low, high, goal, largest, heat, WEIGH: tl.constexpr, BLOCK: tl.constexpr
):
    """The least key, from one candidate's to the highest's, above which is less than the goal.

    And what is above it. The range closes in on candidates' keys: fewer steps than bits.
    """
    above = _number(0.0)
    while low < high:
        found, least, greatest = _weight_above(
            near_ptr, number, low + (high - low) // 2, largest, heat, WEIGH, BLOCK
        )
        low = tl.where(found < goal, low, least)
        high = tl.where(found < goal, greatest, high)
        above = tl.where(found < goal, found, above)
    return low, above


@triton.jit
def _edge(near_ptr, number, whole, size, largest, heat, most, share, BLOCK: tl.constexpr):
    """The least key that top-k and top-p keep, and how many of those that equal it."""
    top = _key(largest).to(tl.int64)
    of_all, edge, _ = _weight_above(near_ptr, number, -(2**31) - 1, largest, heat, True, BLOCK)
    equals = tl.cast(number, tl.int64)
    if most < size:
        whole = of_all
    if most < number:
        edge, above = _halved(
            near_ptr, number, edge, top, most.to(tl.float64), largest, heat, False, BLOCK
        )
        equals = most - above.to(tl.int64)
        if share < 1.0:
            whole, _, _ = _weight_above(near_ptr, number, edge, largest, heat, True, BLOCK)
            whole += equals.to(tl.float64) * tl.exp(_exponent(_of_key(edge), largest, heat, True))
    if share < 1.0:
        goal = (share - _TOP_P_TOLERANCE * (1.0 - share)) * whole
        low, above = _halved(near_ptr, number, edge, top, goal, largest, heat, True, BLOCK)
        # Of equals, each is kept that has less than the goal before it; the first of all anyway.
        each = tl.exp(_exponent(_of_key(low), largest, heat, True))
        kept = tl.ceil((goal - above) / tl.where(each > 0.0, each, 1.0))
        kept = tl.where(each > 0.0, tl.maximum(kept, 1.0), number)
        kept = tl.minimum(kept, number).to(tl.int64)
        equals = tl.where(low == edge, tl.minimum(equals, kept), kept)
        edge = low
    return edge, equals


@triton.jit
def _kept(near_ptr, base, number, largest, heat, edge, equals, seen, least, BLOCK: tl.constexpr):
    """Places and weights of a block of candidates, 0 where it is not kept; equals seen so far."""
    at = base + tl.arange(0, BLOCK)
    z = tl.load(near_ptr + at, mask=at < number, other=0.0)
    key = _key(z)
    equal = ((at < number) & (key == edge)).to(tl.int32)
    rank = seen + tl.cumsum(equal, axis=0) - equal
    keep = (at < number) & ((key > edge) | ((equal > 0) & (rank < equals)))
    weight = tl.exp(_exponent(z, largest, heat, keep))
    return at, tl.where(weight >= least, weight, 0.0), seen + tl.sum(equal, axis=0)


@triton.jit
def _first_beyond(at, weight, reached, target, none):
    """The first place whose sum is beyond the target, `none` without one; the last that weighs."""
    # Sums of a scan need not rise from one to the next to the last bit: what weighs nothing is out.
    beyond = (weight > 0.0) & (reached + tl.cumsum(weight, axis=0) > target)
    first = tl.min(tl.where(beyond, at, none), axis=0)
    return first, tl.max(tl.where(weight > 0.0, at, -1), axis=0)


@triton.jit
def draw_kernel(
    z_ptr, uniform_ptr, largest_ptr, heat_ptr, k_ptr, p_ptr, min_ptr, sums_ptr, near_ptr, id_ptr,
    number_ptr, token_ptr, logprob_ptr, size, stride, splits, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
):  # fmt: skip
    """The token of a row, and the logarithm of its probability."""
    row = tl.program_id(0).to(tl.int64)
    valid, largest = _largest(largest_ptr, row, splits, SPLITS)
    heat, most, share, least = _rule(
        row, size, heat_ptr, k_ptr, p_ptr, min_ptr, TOP_K, TOP_P, MIN_P
    )
    uniform = tl.load(uniform_ptr + row).to(tl.float64)
    whole = _whole(sums_ptr, row, splits, SPLITS)
    number = tl.load(number_ptr + row)
    near_ptr += row * size
    token = tl.full((), -1, dtype=tl.int64)
    drawn = _number(0.0)
    if number > 0:
        edge, equals = _edge(
            near_ptr, number, whole, size, largest, heat, most, share, BLOCK
        )  # fmt: skip
        whole = _number(0.0)
        seen = tl.full((), 0, dtype=tl.int32)
        for base in range(0, number, BLOCK):
            _, weight, seen = _kept(
                near_ptr, base, number, largest, heat, edge, equals, seen, least, BLOCK
            )
            whole += tl.sum(weight, axis=0)
        place, last = number, number * 0
        reached = _number(0.0)
        seen = tl.full((), 0, dtype=tl.int32)
        for base in range(0, number, BLOCK):
            at, weight, seen = _kept(
                near_ptr, base, number, largest, heat, edge, equals, seen, least, BLOCK
            )
            first, latest = _first_beyond(at, weight, reached, uniform * whole, number)
            place, last = tl.minimum(place, first), tl.maximum(last, latest)
            reached += tl.sum(weight, axis=0)
        place = tl.where(place < number, place, last)
        drawn = tl.exp(_exponent(tl.load(near_ptr + place), largest, heat, True))
        token = tl.load(id_ptr + row * size + place).to(tl.int64)
    elif valid:
        of_split = tl.arange(0, SPLITS)
        weight = tl.load(sums_ptr + row * splits + of_split, mask=of_split < splits, other=0.0)
        split, last = _first_beyond(of_split, weight, 0.0, uniform * whole, splits)
        split = tl.where(split < splits, split, last)
        reached = tl.sum(tl.where(of_split < split, weight, 0.0), axis=0)
        at = split * SPLIT + tl.arange(0, SPLIT)
        z = tl.load(z_ptr + row * stride + at, mask=at < size, other=0.0).to(tl.float32)
        weight = tl.exp(_exponent(z, largest, heat, at < size))
        place, last = _first_beyond(at, weight, reached, uniform * whole, size)
        place = tl.where(place < size, place, last)
        drawn = tl.sum(tl.where(at == place, weight, 0.0), axis=0)
        token = place.to(tl.int64)
    tl.store(token_ptr + row, token)
    logprob = tl.where(valid, tl.log(drawn / whole), float("nan"))
    tl.store(logprob_ptr + row, logprob.to(tl.float32))
