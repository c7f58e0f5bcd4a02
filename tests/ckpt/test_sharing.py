"""Replicas read a part of what they want each, and get the rest from one another."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.default_engine import DefaultEngine
from mcore_ckpt.engine import Region
from mcore_ckpt.sharing import Twins
from mcore_ckpt.storage import Readable
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.testing import RankPool

SHAPES = {"model/up": (48, 40), "model/down": (30, 64), "model/norm": (7,), "exp_avg/up": (48, 40)}
WHOLES = {name: TensorLayout.whole(name, shape) for name, shape in SHAPES.items()}


def value(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(SHAPES[name], generator=generator)


class Counting(DefaultEngine):
    """Counts the bytes of the chunks that are read."""

    num_bytes = 0

    def visit(
        self, storage: Readable, regions: Sequence[Region], take: Callable[[int, Any], None]
    ) -> None:
        self.num_bytes += sum(region.info.chunk_bytes for region in regions)
        super().visit(storage, regions, take)


def wanted(rank: int, *, tp: int) -> dict[str, LayoutTensor]:
    """up and the padded vocabulary of a rank of tp, replicated over the others; flat moments."""
    at = rank % tp
    fused = TensorLayout.concat(
        [
            WHOLES["model/up"].slice(0, 48 // tp * at, 48 // tp * at + 48 // tp),
            WHOLES["model/down"].slice(1, 8, 48).replicated(rank // tp, 4 // tp),
            TensorLayout.padding((2, 40)),
        ]
    )
    layouts = {"fused": fused, "norm": WHOLES["model/norm"], "same": WHOLES["model/norm"]}
    flat = WHOLES["exp_avg/up"].reshaped((48 * 40,)).flat_range(480 * rank, 480 * rank + 480)
    dtype = torch.bfloat16 if tp == 2 and at else torch.float32
    return {
        "moments": LayoutTensor(torch.full(flat.shape, 9.0), flat),
        **{
            key: LayoutTensor(torch.full(layout.shape, 9.0, dtype=dtype), layout)
            for key, layout in layouts.items()
        },
    }


def load(folder: Path, tp: int, verify: bool, share: bool) -> int:
    group = Group.world()
    engine, tensors = Counting(), wanted(group.rank, tp=tp)
    moments = {"moments": tensors.pop("moments")}
    for prefix, some in (("model/", tensors), ("exp_avg/", moments)):
        mcore_ckpt.load(
            folder, some, group, engine=engine, verify=verify, share=share, prefixes=[prefix]
        )
    for key, x in (tensors | moments).items():
        expected = torch.zeros_like(x.tensor)
        for fragment, view in x.layout.views(expected):
            view.copy_(value(fragment.name)[fragment.box.slices])
        assert torch.equal(x.tensor, expected), key
    return engine.num_bytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tensors = {name: LayoutTensor(value(name), layout) for name, layout in WHOLES.items()}
    mcore_ckpt.save(folder, step=1, tensors=tensors, chunk_bytes=512)
    return folder


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_reads_a_share(ranks: RankPool, saved: Path, tp: int, verify: bool) -> None:
    """Four ranks of which four, two or none want the same, the ranks of tp 2 in two dtypes."""
    alone = ranks.run(load, 4, saved, tp, verify, False)
    shared = ranks.run(load, 4, saved, tp, verify, True)
    twins = 4 // tp
    moments = 2 * 48 * 40 * 4 / 4  # at most: nobody shares these
    for before, after in zip(alone, shared, strict=True):
        assert after == before if twins == 1 else after < before / twins + moments + 512
    assert sum(shared) < sum(alone) / twins + 4 * moments


def damaged(folder: Path) -> str:
    group = Group.world()
    tensors = {"up": LayoutTensor(torch.zeros(48, 40), WHOLES["model/up"])}
    with pytest.raises(mcore_ckpt.CheckpointError) as error:
        mcore_ckpt.load(folder, tensors, group, share=True, patterns=["model/up"])
    return str(error.value)


def test_damage_that_one_finds_all_hear_of(ranks: RankPool, tmp_path: Path) -> None:
    tensors = {name: LayoutTensor(value(name), layout) for name, layout in WHOLES.items()}
    path = mcore_ckpt.save(tmp_path, step=1, tensors=tensors, chunk_bytes=512)
    chunk = sorted((path / "model/up").glob("c.*"))[-1]
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    for text in ranks.run(damaged, 2, tmp_path):
        assert "model/up" in text
        assert "rank 1 of 2" in text or "rank 0 of 2" in text
        assert "its checksum is not the manifest's" in text


def at_odds(folder: Path) -> str:
    group = Group.world()
    held = LayoutTensor(torch.zeros(7), WHOLES["model/norm"])
    with pytest.raises(ValueError, match="share is set on ranks") as error:
        mcore_ckpt.load(
            folder, {"norm": held}, group, share=group.rank == 1, patterns=["model/norm"]
        )
    return str(error.value)


def test_some_that_share_and_some_that_do_not(ranks: RankPool, saved: Path) -> None:
    expected = "share is set on ranks [1] alone; set it on all or none"
    assert ranks.run(at_odds, 2, saved) == [expected] * 2


def test_all_read_about_as_much() -> None:
    twins = Twins(digest="", place=0, count=3)
    sizes = [8, 1, 1, 1, 8, 2, 8, 3, 1]
    readers = twins.readers(sizes)
    loads = [sum(s for s, r in zip(sizes, readers, strict=True) if r == i) for i in range(3)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= min(loads) + 8


def test_a_process_alone_shares_with_nobody(saved: Path) -> None:
    held = LayoutTensor(torch.zeros(7), WHOLES["model/norm"])
    mcore_ckpt.load(saved, {"norm": held}, share=True, patterns=["model/norm"])
    assert torch.equal(held.tensor, value("model/norm"))
