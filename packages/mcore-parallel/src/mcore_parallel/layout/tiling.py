"""The check that fragments tile every global tensor exactly once per replica."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product

from mcore_parallel.layout.box import Box
from mcore_parallel.layout.fragment import Fragment
from mcore_parallel.layout.layout import TensorLayout


def check_tiling(layouts: Iterable[TensorLayout]) -> None:
    """Check the layouts of all ranks together: every named tensor is tiled once per replica.

    Linear in the number of fragments (times 2 to the number of dimensions that are cut); of tensors
    that are cut alike one is looked at.

    Raises:
        ValueError: fragments of one name disagree on its shape or number of replicas, a replica is
            absent, or elements are missing or held twice; names the tensor, the replica and the
            first such box in row-major order.
    """
    by_name: dict[str, list[Fragment]] = defaultdict(list)
    for layout in layouts:
        for fragment in layout.fragments:
            by_name[fragment.name].append(fragment)
    right: set[tuple[object, ...]] = set()  # how tensors are cut that have been found right
    for name, fragments in by_name.items():
        cut = tuple([(f.global_shape, f.box, f.replica, f.num_replicas) for f in fragments])
        if cut not in right:
            _check_tensor(name, fragments)
            right.add(cut)


def _check_tensor(name: str, fragments: Sequence[Fragment]) -> None:
    shape, count = fragments[0].global_shape, fragments[0].num_replicas
    boxes: dict[int, list[Box]] = defaultdict(list)
    for f in fragments:
        if f.global_shape != shape:
            raise ValueError(
                f"{name}: global shapes {list(shape)} and {list(f.global_shape)} differ"
            )
        if f.num_replicas != count:
            raise ValueError(f"{name}: one fragment has {count} replicas, another {f.num_replicas}")
        boxes[f.replica].append(f.box)
    for replica in range(count):
        error = first_tiling_error(Box.whole(shape), boxes.get(replica, ()))
        if error:
            what, box = error
            of = f" in replica {replica} of {count}" if count > 1 else ""
            raise ValueError(f"{name} {list(shape)}: elements {box} are {what}{of}")


def first_tiling_error(whole: Box, boxes: Sequence[Box]) -> tuple[str, Box] | None:
    """Return None when the boxes tile `whole` exactly, else what is wrong and where first.

    The number of boxes over a point, minus 1 inside `whole`, is zero everywhere exactly when its
    mixed finite difference is, and that difference is non-zero only at corners of boxes: so it is
    enough to add up signs at corners. The row-major first corner with a non-zero sum is the
    row-major first wrong element, and the sign tells a hole from an overlap.
    """
    boxes = [box for box in boxes if box.numel]
    if not whole.numel or (len(boxes) == 1 and boxes[0] == whole):
        return None
    dims = [
        i
        for i in range(len(whole.shape))
        if any(b.start[i] != whole.start[i] or b.shape[i] != whole.shape[i] for b in boxes)
    ]
    sums: dict[tuple[int, ...], int] = defaultdict(int)
    for box, weight in [(whole, -1), *((box, 1) for box in boxes)]:
        ends = [((box.start[i], 1), (box.start[i] + box.shape[i], -1)) for i in dims]
        for signs in product(*ends):
            sign = weight
            for _, factor in signs:
                sign *= factor
            sums[tuple([x for x, _ in signs])] += sign
    wrong = [corner for corner, value in sums.items() if value]
    if not wrong:
        return None
    corner = min(wrong)
    point = list(whole.start)
    for i, x in zip(dims, corner, strict=True):
        point[i] = x
    if sums[corner] < 0:
        return "missing", _grown_hole(point, whole, boxes)
    unit = Box(tuple(point), (1,) * len(point))
    first, second = [box for box in boxes if box.contains(unit)][:2]
    common = first.intersect(second)
    assert common is not None
    return "held twice", common


def _grown_hole(point: Sequence[int], whole: Box, boxes: Sequence[Box]) -> Box:
    """Return a box of points that no box covers, grown from `point`, last dimension first."""
    start, shape = tuple(point), [1] * len(point)
    for i in reversed(range(len(point))):
        end = whole.start[i] + whole.shape[i]
        beam = Box(start, (*shape[:i], end - start[i], *shape[i + 1 :]))
        ends = [common.start[i] for box in boxes if (common := beam.intersect(box))]
        shape[i] = min([end, *ends]) - start[i]
    return Box(start, tuple(shape))
