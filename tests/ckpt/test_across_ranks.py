"""Saving and loading over real ranks: other layouts, other numbers of ranks, and errors."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.engine import ChunkData, Writing
from mcore_ckpt.storage import Storage
from mcore_ckpt.tensorstore_engine import TensorstoreEngine
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.testing import RankPool

Layouts = dict[str, TensorLayout]
UNSTORED = torch.float4_e2m1fn_x2
HIDDEN, VOCAB, EXPERTS, FFN = 6, 7, 4, 5
SHAPES = {
    "model/embedding.weight": (VOCAB, HIDDEN),
    "model/layers.0.attention.q.weight": (8, HIDDEN),
    "model/layers.0.attention.k.weight": (4, HIDDEN),
    "model/layers.1.mlp.down.weight": (HIDDEN, 9),
    "model/layers.1.moe.experts.up.weight": (EXPERTS, FFN, HIDDEN),
    "model/odd": (1001,),
    **{f"model/small.{i}": (3,) for i in range(10)},
    "model/uneven": (6,),
}


def value(name: str) -> torch.Tensor:
    """The global tensor of this name, the same wherever it is made."""
    prefix, _, rest = name.partition("/")
    generator = torch.Generator().manual_seed(len(rest) * 31 + len(prefix))
    return torch.randn(SHAPES[f"model/{rest}"], generator=generator)


def even(size: int, rank: int, world: int) -> tuple[int, int]:
    """Rounded-up slices: the last ranks get less, or nothing."""
    step = -(-size // world)
    return min(rank * step, size), min((rank + 1) * step, size)


def tensor_parallel(rank: int, world: int) -> Layouts:
    """Columns, rows and vocabulary cut, the vocabulary padded; the rest replicated."""
    layouts: Layouts = {}
    for name, shape in SHAPES.items():
        whole = TensorLayout.whole(name, shape)
        if "embedding" in name:
            padded = TensorLayout.concat([whole, TensorLayout.padding((8 - VOCAB, HIDDEN))])
            layouts[name] = padded.slice(0, *even(8, rank, world))
        elif "attention" in name:
            layouts[name] = whole.slice(0, *even(shape[0], rank, world))
        elif "down" in name:
            layouts[name] = whole.slice(1, *even(shape[1], rank, world))
        elif "uneven" in name:
            layouts[name] = whole.slice(0, *even(6, rank, world))
        else:
            layouts[name] = whole.replicated(rank, world)
    return layouts


def pipeline_and_experts(rank: int, world: int) -> Layouts:
    """Whole tensors, each on one rank; experts spread over all; q and k fused."""
    layouts: Layouts = {}
    wholes = {name: TensorLayout.whole(name, shape) for name, shape in SHAPES.items()}
    q, k = (wholes.pop(f"model/layers.0.attention.{p}.weight") for p in "qk")
    wholes["fused"] = TensorLayout.concat([q, k])
    for i, (name, whole) in enumerate(wholes.items()):
        if "experts" in name:
            layouts[name] = whole.slice(0, *even(EXPERTS, rank, world))
        elif i % world == rank:
            layouts[name] = whole
    return layouts


def zero_one(rank: int, world: int) -> Layouts:
    """All parameters flattened one after the other, and cut without regard to their borders."""
    parts = [flattened(name, shape) for name, shape in SHAPES.items()]
    bucket = TensorLayout.concat(parts)
    return {"shard": bucket.flat_range(*even(bucket.numel, rank, world))}


def flattened(name: str, shape: tuple[int, ...]) -> TensorLayout:
    whole = TensorLayout.whole(name, shape)
    return whole.reshaped((whole.numel,))


STYLES: dict[str, Callable[[int, int], Layouts]] = {
    "tensor parallel": tensor_parallel,
    "pipeline and experts": pipeline_and_experts,
    "zero-1": zero_one,
}


def make(style: str, rank: int, world: int, *, filled: bool) -> dict[str, LayoutTensor]:
    """Weights under a style, and one moment always as flat shards."""
    layouts = STYLES[style](rank, world)
    moments = zero_one(rank, world)["shard"]
    layouts["moments"] = moments.renamed(lambda name: name.replace("model/", "exp_avg/"))
    result = {}
    for key, layout in layouts.items():
        local = torch.zeros(layout.shape) if filled else torch.full(layout.shape, 7.0)
        if filled:
            for fragment, view in layout.views(local):
                view.copy_(value(fragment.name)[fragment.box.slices])
        result[key] = LayoutTensor(local, layout)
    return result


def check(tensors: dict[str, LayoutTensor]) -> None:
    for key, held in tensors.items():
        expected = torch.zeros(held.layout.shape)
        for fragment, view in held.layout.views(expected):
            view.copy_(value(fragment.name)[fragment.box.slices])
        assert torch.equal(held.tensor, expected), key


def save_all(folder: Path) -> None:
    group = Group.world()
    for style in STYLES:
        tensors = make(style, group.rank, group.size, filled=True)
        path = mcore_ckpt.save(
            folder / style,
            step=3,
            tensors=tensors,
            state={"consumed": 12},
            group=group,
            chunk_bytes=256,
            exchange_bytes=600,
        )
        assert path == folder / style / "step_00000003"
        assert mcore_ckpt.latest(folder / style) == path


def load_all(folder: Path) -> None:
    group = Group.world()
    for saved in STYLES:
        for style in STYLES:
            tensors = make(style, group.rank, group.size, filled=False)
            report = mcore_ckpt.load(folder / saved, tensors, group)
            assert (report.step, report.missing, report.unexpected) == (3, (), ())
            check(tensors)


@pytest.fixture(scope="module")
def saved_by(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Checkpoints saved by so many ranks under every style (made at the first use)."""
    made: dict[int, Path] = {}

    def get(world: int) -> Path:
        if world not in made:
            made[world] = tmp_path_factory.mktemp(f"world{world}")
            ranks.run(save_all, world, made[world])
        return made[world]

    return get


@pytest.mark.parametrize(("saving", "loading"), [(4, 4), (4, 3), (4, 1), (3, 2), (2, 4)])
def test_other_ranks_and_layouts(
    ranks: RankPool, saved_by: Callable[[int], Path], saving: int, loading: int
) -> None:
    """U43, U44, U45: uneven and zero-size shards, vocabulary 7, experts, moments as flat shards."""
    ranks.run(load_all, loading, saved_by(saving))


def test_the_files_are_the_same_whoever_saved(saved_by: Callable[[int], Path]) -> None:
    trees = []
    for world in (4, 3):
        for style in STYLES:
            root = saved_by(world) / style / "step_00000003"
            found = sorted(p for p in root.rglob("*") if p.is_file())
            trees.append({str(p.relative_to(root)): p.read_bytes() for p in found})
    assert all(tree == trees[0] for tree in trees)


def held_chunks(folder: Path) -> list[str]:
    """Which chunk files this rank wrote: the other ranks' are recorded by them."""
    group = Group.world()
    engine = CountingEngine()
    tensors = make("zero-1", group.rank, group.size, filled=True)
    mcore_ckpt.save(folder, step=1, tensors=tensors, group=group, chunk_bytes=256, engine=engine)
    return engine.written


class CountingEngine(TensorstoreEngine):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        chunks = list(chunks)
        self.written += (f"{c.array}/{c.info.grid.key(c.number)}" for c in chunks)
        return super().write(storage, chunks)


def test_every_chunk_has_one_writer_and_ranks_write_alike(ranks: RankPool, tmp_path: Path) -> None:
    by_rank = ranks.run(held_chunks, 4, tmp_path)
    written = [chunk for chunks in by_rank for chunk in chunks]
    assert len(written) == len(set(written))
    on_disk = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("c.*")}
    assert set(written) == on_disk
    sizes = [sum((tmp_path / chunk).stat().st_size for chunk in chunks) for chunks in by_rank]
    assert max(sizes) <= 1.2 * sum(sizes) / len(sizes)


class FullDisk(TensorstoreEngine):
    """Fails as a full disk does, on one rank, for the second portion of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        self.calls += 1
        if self.calls == 2:
            raise OSError(28, os.strerror(28), "somewhere")
        return super().write(storage, chunks)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, mcore_ckpt.CheckpointError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def failing_saves(folder: Path) -> list[str]:
    group = Group.world()
    good = make("zero-1", group.rank, group.size, filled=True)
    mcore_ckpt.save(folder, step=10, tensors=good, group=group)
    odd = group.rank == 1

    def save(**changes: Any) -> str:
        arguments: dict[str, Any] = {
            "step": 20,
            "tensors": good,
            "group": group,
            "keep_last": 1,
        } | changes
        return error_of(lambda: mcore_ckpt.save(folder, **arguments))

    whole = TensorLayout.whole("model/same", (2,))
    mine = torch.tensor([0.0, 1.0]) + 2 * group.rank
    conflict = {"local": LayoutTensor(mine, whole)}
    unstored = LayoutTensor(torch.empty(2, dtype=UNSTORED), whole)
    of_two_types = LayoutTensor(
        torch.zeros(2, dtype=torch.bfloat16 if odd else torch.float32),
        whole.replicated(group.rank, group.size),
    )
    return [
        save(engine=FullDisk() if odd else None, chunk_bytes=256, exchange_bytes=600),
        save(tensors=good | {"bad": unstored} if odd else good),
        save(state={"loader": {"position": group.rank}}),
        save(tensors=good | conflict),
        save(tensors=good | {"local": of_two_types}),
        save(tensors={k: v for k, v in good.items() if not odd or k != "moments"}),
        save(step=20 + group.rank),
    ]


def test_an_error_on_one_rank_is_raised_on_all(ranks: RankPool, tmp_path: Path) -> None:
    """U46 and its kinds: conflicting claims are refused by name; nobody hangs; nothing commits."""
    by_rank = ranks.run(failing_saves, 2, tmp_path)
    expected = [
        ("CheckpointError", ["rank 1 of 2", "No space left", "nothing was committed"]),
        ("ValueError", ["bad", "float4_e2m1fn_x2 cannot be stored"]),
        ("ValueError", ["state['loader']['position'] is 0 on rank 0 but 1 on rank 1"]),
        ("ValueError", ["model/same", "held twice"]),
        ("ValueError", ["model/same", "rank 0 holds it as float32, rank 1 as bfloat16"]),
        ("ValueError", ["exp_avg/", "missing"]),
        ("ValueError", ["step is 20 on rank 0 but 21 on rank 1"]),
    ]
    for errors in by_rank:
        for error, (kind, parts) in zip(errors, expected, strict=True):
            assert error.startswith(kind), error
            assert all(part in error for part in parts), error
    assert os.listdir(tmp_path) == ["step_00000010"]
    assert not mcore_ckpt.verify(tmp_path).problems


def no_room(
    real: Callable[..., Any], concerns: Callable[..., bool], call: int
) -> Callable[..., Any]:
    """As a function of torch, but out of memory at the n-th call that `concerns` matches."""
    calls = 0

    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if concerns(*args):
            calls += 1
            if calls == call:
                raise torch.OutOfMemoryError("no room for a copy")
        return real(*args, **kwargs)

    return planted


def saves_without_memory(folder: Path) -> list[str]:
    group = Group.world()
    # Every chunk is eight rows of both ranks.
    layout = TensorLayout.whole("model/w", (64, 6)).slice(1, 3 * group.rank, 3 * group.rank + 3)
    shard = torch.ones(layout.shape)
    tensors = {"shard": LayoutTensor(shard, layout)}
    mcore_ckpt.save(folder, step=10, tensors=tensors, group=group)
    arguments: dict[str, Any] = {"chunk_bytes": 256, "exchange_bytes": 600, "group": group}
    save = partial(mcore_ckpt.save, folder, step=20, tensors=tensors, **arguments)
    # Only what is as long as the shard is copied to the CPU; only chunks are made of a tuple.
    plants: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.Tensor, "cpu", no_room(torch.Tensor.cpu, lambda x: x.shape == shard.shape, 1)),
        *(
            (torch, "empty", no_room(torch.empty, lambda *args: isinstance(args[0], tuple), call))
            for call in (1, 4)
        ),
    ]
    errors = []
    for owner, function, planted in plants:
        with pytest.MonkeyPatch.context() as patch:
            if group.rank == 1:
                patch.setattr(owner, function, planted)
            errors.append(error_of(save))
    assert error_of(save) == "no error"
    return errors


def test_a_rank_that_lacks_memory_stops_all(ranks: RankPool, tmp_path: Path) -> None:
    """No room to copy to the CPU, or for chunks, at first or while others are written: no hang."""
    by_rank = ranks.run(saves_without_memory, 2, tmp_path, timeout=60)
    for errors in by_rank:
        assert len(errors) == 3
        for error in errors:
            assert error.startswith("CheckpointError: saving step 20"), error
            assert "nothing was committed: rank 1 of 2: no room for a copy" in error
    assert sorted(os.listdir(tmp_path)) == ["step_00000010", "step_00000020"]
    assert not mcore_ckpt.verify(tmp_path).problems


def failing_loads(folder: Path) -> list[str]:
    group = Group.world()
    tensors = make("tensor parallel", group.rank, group.size, filled=False)
    extra = LayoutTensor(torch.zeros(2), TensorLayout.whole(f"model/new{group.rank}", (2,)))
    longer = LayoutTensor(torch.zeros(7), TensorLayout.whole("model/uneven", (7,)))
    unstored = LayoutTensor(torch.empty(2, dtype=UNSTORED), TensorLayout.whole("model/odd", (2,)))
    odd = group.rank == 1
    bad = [
        {"extra": extra},
        {"model/uneven": longer} if odd else {},
        {"x": unstored} if odd else {},
    ]
    errors = [error_of(partial(mcore_ckpt.load, folder, tensors | more, group)) for more in bad]
    errors.append(error_of(lambda: mcore_ckpt.load(folder / "nowhere", tensors, group)))
    return errors


def test_a_misfit_on_one_rank_is_raised_on_all(
    ranks: RankPool, saved_by: Callable[[int], Path]
) -> None:
    expected = [
        ("ValueError", "2 missing: model/new0, model/new1"),
        ("ValueError", "model/uneven (checkpoint [6], here [7])"),
        ("ValueError", "float4_e2m1fn_x2"),
        ("FileNotFoundError", "no committed checkpoint"),
    ]
    for errors in ranks.run(failing_loads, 2, saved_by(3) / "zero-1"):
        for error, (kind, part) in zip(errors, expected, strict=True):
            assert error.startswith(kind), error
            assert part in error, error
