"""Every kind of damage is found and named; reading damaged data is an error, never zeros."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.commit import Marker
from mcore_ckpt.manifest import sha256
from mcore_parallel.layout import LayoutTensor, TensorLayout

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
    data = json.dumps(document | {"version": 2}).encode()
    (path / "manifest.json").write_bytes(data)
    marker = Marker(manifest_bytes=len(data), manifest_sha256=sha256(data))
    (path / "COMMIT").write_bytes(marker.encode())
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"version 2; this release .* versions 1"):
        mcore_ckpt.open(path)
