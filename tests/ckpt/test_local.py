"""Checkpoints on each machine's own disk: copies, lost machines, other layouts."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.local import find_local, load_local, save_local
from mcore_ckpt.local.saving import peers
from mcore_ckpt.local.share import ShareName, read_share
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.testing import RankPool

SHAPES = {"model/w": (8, 3), "model/odd": (13,), "exp_avg/w": (8, 3), "model/count": ()}


def value(name: str, step: int) -> torch.Tensor:
    shape = SHAPES[name]
    kind = torch.int64 if name == "model/count" else torch.float32
    numbers = torch.arange(max(1, torch.Size(shape).numel())).to(kind) + 100 * step + len(name)
    return numbers.view(shape)


def even(size: int, rank: int, world: int) -> tuple[int, int]:
    step = -(-size // world)
    return min(rank * step, size), min((rank + 1) * step, size)


def make(group: Group, style: str, step: int | None) -> dict[str, LayoutTensor]:
    """Rows, or flat shards of everything with padding; filled with a step's values, or with -1."""
    tensors = {}
    for name, shape in SHAPES.items():
        whole = TensorLayout.whole(name, shape)
        if not shape:
            layout = whole.replicated(group.rank, group.size)
        elif style == "rows":
            layout = whole.slice(0, *even(shape[0], group.rank, group.size))
        else:
            flat = whole.reshaped((whole.numel,))
            padded = TensorLayout.concat([flat, TensorLayout.padding((3,))])
            layout = padded.flat_range(*even(padded.numel, group.rank, group.size))
        kind = torch.int64 if name == "model/count" else torch.float32
        local = torch.full(layout.shape, -1, dtype=kind)
        if step is not None:
            for fragment, view in layout.views(local):
                view.copy_(value(name, step)[fragment.box.slices])
        tensors[name] = LayoutTensor(local, layout)
    return tensors


def check(tensors: dict[str, LayoutTensor], step: int) -> None:
    for name, held in tensors.items():
        expected = torch.zeros_like(held.tensor)
        for fragment, view in held.layout.views(expected):
            view.copy_(value(name, step)[fragment.box.slices])
        assert torch.equal(held.tensor, expected), name


def machine(folder: Path, rank: int) -> Path:
    return folder / f"machine{rank}"


def save_steps(folder: Path, steps: list[int], copies: int, style: str) -> None:
    group = Group.world()
    for step in steps:
        save_local(
            machine(folder, group.rank),
            step=step,
            tensors=make(group, style, step),
            state={"step": step},
            group=group,
            copies=copies,
            host=f"machine{group.rank}",
            piece_bytes=500,
        )


def recover(folder: Path, style: str) -> int | None:
    group = Group.world()
    found = find_local(machine(folder, group.rank), group)
    if found is None:
        return None
    tensors = make(group, style, None)
    report = load_local(found, tensors, group)
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    check(tensors, found.step)
    assert found.state == {"step": found.step}
    return found.step


def names(folder: Path) -> list[ShareName]:
    found = [ShareName.parse(name) for name in sorted(os.listdir(folder))]
    assert None not in found, "something else is left there"
    return [name for name in found if name]


def test_one_process(tmp_path: Path) -> None:
    assert find_local(tmp_path / "nothing") is None
    for step in (1, 2):
        group = Group.single()
        save_local(tmp_path, step=step, tensors=make(group, "rows", step), state={"step": step})
        assert [name.step for name in names(tmp_path)] == [step]
    found = find_local(tmp_path)
    assert found is not None
    tensors = make(Group.single(), "flat", None)
    load_local(found, tensors)
    check(tensors, 2)


def test_peers() -> None:
    """On another machine where there is one, and spread over its ranks."""
    assert peers(["a", "a", "b", "b"], 1) == [[2, 3, 0, 1]]
    assert peers(["a", "b", "a", "b", "c"], 1) == [[1, 4, 3, 4, 0]]
    assert peers(["a", "a", "a"], 2) == [[1, 2, 0], [2, 0, 1]]
    assert peers(["a", "b"], 5) == [[1, 0]]
    assert peers(["a"], 1) == []
    assert peers(["a", "b"], 0) == []


@pytest.mark.parametrize(
    ("copies", "lost", "recovered"),
    [(1, [], 2), (1, [2], 2), (1, [0, 2], 2), (1, [1, 2], None), (2, [1, 2], 2), (0, [1], None)],
)
def test_lost_machines(
    ranks: RankPool, tmp_path: Path, copies: int, lost: list[int], recovered: int | None
) -> None:
    """Every share that is left somewhere counts; without one of them the save does not."""
    ranks.run(save_steps, 4, tmp_path, [1, 2], copies, "rows")
    for rank in range(4):
        found = names(machine(tmp_path, rank))
        holders = [(rank - distance) % 4 for distance in range(copies + 1)]
        assert sorted((name.step, name.rank) for name in found) == sorted((2, r) for r in holders)
    for rank in lost:
        shutil.rmtree(machine(tmp_path, rank))
    assert ranks.run(recover, 4, tmp_path, "rows") == [recovered] * 4


@pytest.mark.parametrize(("world", "style"), [(4, "flat"), (3, "flat"), (2, "rows")])
def test_other_layouts_and_fewer_ranks(
    ranks: RankPool, tmp_path: Path, world: int, style: str
) -> None:
    ranks.run(save_steps, 4, tmp_path, [7], 2, "rows")
    assert ranks.run(recover, world, tmp_path, style) == [7] * world


def test_a_save_cut_short_does_not_count(ranks: RankPool, tmp_path: Path) -> None:
    """A crash between the files of two ranks: the step before is complete on all of them."""
    ranks.run(save_steps, 2, tmp_path, [1], 0, "rows")
    for rank in range(2):
        shutil.copytree(machine(tmp_path, rank), tmp_path / "older" / f"machine{rank}")
    ranks.run(save_steps, 2, tmp_path, [2], 0, "rows")
    for rank in range(2):
        (one,) = names(machine(tmp_path, rank))
        for share in (tmp_path / "older" / f"machine{rank}").iterdir():
            shutil.copy(share, machine(tmp_path, rank))
        if rank == 1:  # of step 2 there is only a part, and of a third one a file without a name
            whole = machine(tmp_path, rank) / str(one)
            whole.write_bytes(whole.read_bytes()[:-64])
            (machine(tmp_path, rank) / f"{one}.77.part").write_bytes(b"half")
    assert ranks.run(recover, 2, tmp_path, "rows") == [1, 1]
    ranks.run(save_steps, 2, tmp_path, [3], 0, "rows")
    assert [name.step for rank in range(2) for name in names(machine(tmp_path, rank))] == [3, 3]


def test_damage(tmp_path: Path) -> None:
    """A flipped bit of a tensor is an error, of the header as if the file was not there."""
    save_local(tmp_path, step=1, tensors=make(Group.single(), "rows", 1))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    share = read_share(path)
    at = share.tensors["exp_avg/w"]["offset"]
    data[at] ^= 1
    path.write_bytes(data)
    found = find_local(tmp_path)
    assert found is not None
    tensors = make(Group.single(), "rows", None)
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"share: exp_avg/w is damaged"):
        load_local(found, tensors)
    assert bool((tensors["model/w"].tensor == -1).all())
    for place in (3, 40, 120):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert find_local(tmp_path) is None
    with pytest.raises(mcore_ckpt.CheckpointError, match="header is damaged"):
        read_share(path)


def fail_on_one(folder: Path) -> list[str]:
    """Rank 1 cannot write, first its own share, then the copy of another's."""
    group = Group.world()
    save_steps(folder, [1], 1, "rows")
    messages = []
    for allowed in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            if group.rank == 1:
                patch.setattr(os, "replace", FullAfter(allowed))
            try:
                save_steps(folder, [2], 1, "rows")
            except mcore_ckpt.CheckpointError as error:
                messages.append(str(error))
    assert recover(folder, "rows") == 1
    return messages


class FullAfter:
    """`os.replace` on a disk that is full after some calls."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.replace = os.replace

    def __call__(self, source: Any, target: Any) -> None:
        self.allowed -= 1
        if self.allowed < 0:
            raise OSError(28, "No space left on device", str(target))
        self.replace(source, target)


def test_an_error_leaves_the_save_before(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(fail_on_one, 2, tmp_path)
    assert len(first) == len(second) == 2
    for message in first:
        assert "rank 1 of 2" in message
        assert "free space there" in message
    for rank in range(2):
        assert {name.step for name in names(machine(tmp_path, rank))} == {1}


def save_with_other_copies(folder: Path) -> None:
    group = Group.world()
    save_local(folder, step=1, tensors={}, group=group, copies=group.rank)


def test_ranks_that_want_other_numbers_of_copies(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="copies is 0 on rank 0 but 1 on rank 1 of 2"):
        ranks.run(save_with_other_copies, 2, tmp_path)


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="copies is -1; nearest valid: 0"):
        save_local(tmp_path, step=1, tensors={}, copies=-1)
    with pytest.raises(ValueError, match="step -1 must be"):
        save_local(tmp_path, step=-1, tensors={})
    save_local(tmp_path, step=1, tensors=make(Group.single(), "rows", 1))
    found = find_local(tmp_path)
    assert found is not None
    other = LayoutTensor(torch.zeros(2), TensorLayout.whole("model/other", (2,)))
    with pytest.raises(ValueError, match=r"1 missing: model/other; 4 unexpected"):
        load_local(found, {"o": other})
    with pytest.warns(RuntimeWarning, match="missing: model/other"):
        load_local(found, {"o": other}, strict="warn", prefixes=["model/o"])
