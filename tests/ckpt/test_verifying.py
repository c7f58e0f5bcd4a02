"""Every kind of damage is found and named; reading damaged data is an error, never zeros."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.cli import main
from mcore_ckpt.commit import Marker
from mcore_ckpt.manifest import sha256
from mcore_parallel.collectives import barrier
from mcore_parallel.group import Group
from mcore_parallel.layout import Box, LayoutTensor, TensorLayout
from mcore_parallel.testing import RankPool

W = "model/layers.0.mlp.up.weight"


def whole(name: str, value: torch.Tensor) -> LayoutTensor:
    return LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {
        "w": whole(W, torch.randn(8, 6)),
        "m": whole("exp_avg/" + W.removeprefix("model/"), torch.randn(8, 6).bfloat16()),
    }
    return mcore_ckpt.save(
        tmp_path, step=1, tensors=tensors, files={"vocab": b"a b"}, chunk_bytes=48
    )


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(bytes(data))


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_whole(path: Path) -> None:
    found = mcore_ckpt.verify(path.parent)
    assert found.problems == ()
    assert (found.path, found.num_tensors, found.num_bytes) == (path, 2, 8 * 6 * 6)
    assert found.num_chunks == len(list(path.rglob("c.*"))) > 4


@pytest.mark.parametrize(
    ("damage", "what"),
    [(flip_a_bit, "damaged"), (cut_short, "has 47 bytes instead of 48"), (Path.unlink, "missing")],
)
def test_a_damaged_chunk_is_named(path: Path, damage: Callable[[Path], None], what: str) -> None:
    damage(path / W / "c.1.1")
    (problem,) = mcore_ckpt.verify(path).problems
    assert (problem.tensor, problem.chunk) == (W, (1, 1))
    assert what in str(problem)
    assert f"tensor {W} chunk [1, 1]" in str(problem)


def test_every_bit_of_every_file_matters(path: Path) -> None:
    """One flipped bit anywhere in the directory is found."""
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        original = file.read_bytes()
        flip_a_bit(file)
        assert mcore_ckpt.verify(path).problems, file
        file.write_bytes(original)
    assert not mcore_ckpt.verify(path).problems


@pytest.mark.parametrize("name", ["zarr.json", f"{W}/zarr.json", "files/vocab"])
def test_missing_documents_and_files(path: Path, name: str) -> None:
    (path / name).unlink()
    (problem,) = mcore_ckpt.verify(path).problems
    assert str(problem) == f"{name} is missing"


def test_a_missing_chunk_is_never_read_as_zeros(path: Path) -> None:
    (path / W / "c.0.0").unlink()
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"cannot read chunk .*c\.0\.0"):
        mcore_ckpt.open(path)[W]
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"loading .* failed: .*c\.0\.0"):
        mcore_ckpt.load(path, {"w": whole(W, torch.zeros(8, 6))}, prefixes=["model/"])


KINDS = {  # of tensors whose chunks of at most 48 bytes do not tile them: the last ones are padded
    "model/f32": torch.arange(1.0, 36.0).view(5, 7),
    "model/bf16": torch.arange(1.0, 36.0).view(5, 7).bfloat16(),
    "model/f8": torch.arange(1.0, 60.0).to(torch.float8_e4m3fn),
    "model/bool": torch.arange(59) % 3 == 0,
    "model/experts": torch.arange(1, 46).view(3, 3, 5),
    "model/scalar": torch.tensor(2.5),
    "model/empty": torch.zeros(0, 3),
}


@pytest.fixture
def kinds(tmp_path: Path) -> Path:
    tensors = {name: whole(name, value) for name, value in KINDS.items()}
    return mcore_ckpt.save(tmp_path, step=1, tensors=tensors, chunk_bytes=48)


def flip_a_byte(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0x01
    file.write_bytes(bytes(data))


def test_a_flipped_byte_of_any_chunk_is_an_error_when_read(kinds: Path) -> None:
    """The first byte and the last of every chunk, which at an edge is padding of the tensor."""
    opened = mcore_ckpt.open(kinds)
    for file in sorted(kinds.rglob("c*")):
        if file.name == "c" or file.name.startswith("c."):
            name = file.parent.relative_to(kinds).as_posix()
            chunk = [int(part) for part in file.name.split(".")[1:]]
            message = re.escape(f"tensor {name} chunk {chunk}: {file} is damaged")
            for position in (0, -1):
                flip_a_byte(file, position)
                with pytest.raises(mcore_ckpt.CheckpointError, match=message):
                    opened.read(name)
                flip_a_byte(file, position)
    for name, value in KINDS.items():
        assert torch.equal(opened.read(name).double(), value.double()), name


def test_a_part_is_verified_with_the_chunks_that_it_touches(kinds: Path) -> None:
    opened = mcore_ckpt.open(kinds)
    info = opened.info("model/f32")
    file = kinds / "model/f32" / info.grid.key(info.grid.num_chunks - 1)
    flip_a_byte(file, 0)
    first, last = Box((0, 0), (1, 1)), Box((4, 6), (1, 1))
    assert opened.read("model/f32", first).item() == 1.0
    with pytest.raises(mcore_ckpt.CheckpointError, match=re.escape(str(file))):
        opened.read("model/f32", last)
    unverified = opened.read("model/f32", verify=False)
    damaged = unverified != KINDS["model/f32"]
    assert damaged.sum() == 1


def load_slices(path: Path, damage: list[tuple[str, int]]) -> list[str]:
    """Damage one chunk after the other; each rank loads some rows of everything; return errors."""
    group = Group.world()
    errors = []
    for file, position in [*damage, ("", 0)]:
        if file and group.rank == 0:
            flip_a_byte(path / file, position)
        barrier(group)
        for verify in (True, False):
            held = {}
            for name, value in KINDS.items():
                layout = TensorLayout.whole(name, tuple(value.shape))
                if layout.shape:
                    half = layout.shape[0] // 2
                    layout = layout.slice(0, *((half, layout.shape[0]), (0, half))[group.rank])
                else:
                    layout = layout.replicated(group.rank, group.size)
                held[name] = LayoutTensor(torch.zeros(layout.shape, dtype=value.dtype), layout)
            try:
                mcore_ckpt.load(path, held, group, verify=verify)
                errors.append("")
            except mcore_ckpt.CheckpointError as error:
                errors.append(str(error))
        barrier(group)
        if file and group.rank == 0:
            flip_a_byte(path / file, position)
    return errors


def test_a_flipped_byte_is_an_error_on_every_rank_that_loads(ranks: RankPool, kinds: Path) -> None:
    """A whole chunk, padded ones, bits of bfloat16, a scalar: also where a rank needs a part."""
    info = mcore_ckpt.open(kinds).manifest.tensors
    damage = [
        (f"{name}/{info[name].grid.key(number % info[name].grid.num_chunks)}", position)
        for name in ("model/f32", "model/bf16", "model/experts", "model/scalar")
        for number in (0, -1)
        for position in (0, -1)
    ]
    by_rank = ranks.run(load_slices, 2, kinds, damage)
    for errors in by_rank:
        assert errors[1::2] == [""] * (len(damage) + 1)  # not verified
        assert errors[-2] == ""  # not damaged
        for error, (file, _) in zip(errors[:-2:2], damage, strict=True):
            assert "loading" in error
            assert str(kinds / file) in error
            assert f"tensor {Path(file).parent} chunk [" in error


@pytest.mark.parametrize("name", ["manifest.json", "COMMIT"])
def test_damaged_metadata_is_an_error(path: Path, name: str) -> None:
    cut_short(path / name) if name == "manifest.json" else (path / name).write_text("{}")
    (problem,) = mcore_ckpt.verify(path).problems
    assert f"{name} " in str(problem)
    assert "damaged" in str(problem)
    for read in (mcore_ckpt.open, mcore_ckpt.read_state):
        with pytest.raises(mcore_ckpt.CheckpointError, match=name):
            read(path)


def test_a_missing_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()
    assert "manifest.json is missing" in str(mcore_ckpt.verify(path.parent).problems[0])


def test_a_damaged_attached_file(path: Path) -> None:
    assert mcore_ckpt.open(path).file("vocab") == b"a b"
    flip_a_bit(path / "files" / "vocab")
    with pytest.raises(mcore_ckpt.CheckpointError, match="vocab is damaged"):
        mcore_ckpt.open(path).file("vocab")


def test_a_newer_format_is_refused(path: Path) -> None:
    document = json.loads((path / "manifest.json").read_text())
    data = json.dumps(document | {"version": 3}).encode()
    (path / "manifest.json").write_bytes(data)
    marker = Marker(manifest_bytes=len(data), manifest_sha256=sha256(data))
    (path / "COMMIT").write_bytes(marker.encode())
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"version 3; this release .* versions 1"):
        mcore_ckpt.open(path)
    for look in (mcore_ckpt.verify, mcore_ckpt.find):
        with pytest.raises(mcore_ckpt.CheckpointError, match="version 3; this release"):
            look(path.parent)
    with pytest.raises(mcore_ckpt.CheckpointError, match="version 3; this release"):
        mcore_ckpt.find(path.parent, scan="full")
    assert main(["verify", str(path)]) == 2, "it is no damage"
