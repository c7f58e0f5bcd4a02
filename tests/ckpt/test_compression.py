"""Compressed chunks: read by everything that reads plain ones, damage found, sizes smaller."""

import json
from pathlib import Path

import pytest
import tensorstore
import torch
import zarr

import mcore_ckpt
from mcore_ckpt import CheckpointError
from mcore_ckpt.cli import main
from mcore_ckpt.codecs import Codec
from mcore_ckpt.file_engine import FileEngine
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.testing import RankPool

VALUES = {
    "model/matrix": (torch.arange(9000.0) // 7).view(90, 100),
    "model/brain": torch.arange(40).bfloat16(),
    "model/eight": torch.arange(12).to(torch.float8_e4m3fn),
    "model/scalar": torch.tensor(3.5),
    "model/empty": torch.zeros(0, 4),
    "exp_avg/odd": torch.randn(5, 3, 7),
}
CODECS = ["zstd", "blosc:lz4:5"]


def whole(values: dict[str, torch.Tensor]) -> dict[str, LayoutTensor]:
    return {
        name: LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))
        for name, value in values.items()
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


@pytest.fixture(scope="module", params=CODECS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    tensors = whole(VALUES)
    return mcore_ckpt.save(
        folder, step=1, tensors=tensors, chunk_bytes=4096, compression=request.param
    )


def test_every_reader_reads_it(saved: Path) -> None:
    """Ours, whole and in part; plain zarr; plain tensorstore. Files are smaller than chunks."""
    opened = mcore_ckpt.open(saved)
    for name, value in VALUES.items():
        assert same(opened[name], value), name
    root = zarr.open_group(saved, mode="r")
    for name in ("model/matrix", "exp_avg/odd"):
        assert torch.equal(torch.from_numpy(root[name][...]), VALUES[name])
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{saved}/{name}/"}}
        found = tensorstore.open(spec).result().read().result()
        assert torch.equal(torch.from_numpy(found), VALUES[name])
    part = LayoutTensor(
        torch.zeros(3, 100, dtype=torch.float64),
        TensorLayout.whole("model/matrix", (90, 100)).slice(0, 41, 44),
    )
    for verify in (True, False):
        part.tensor.zero_()
        mcore_ckpt.load(saved, {"x": part}, prefixes=["model/matrix"], verify=verify)
        assert torch.equal(part.tensor, VALUES["model/matrix"][41:44].double())
    info = opened.info("model/matrix")
    sizes = [file.stat().st_size for file in (saved / "model/matrix").glob("c.*")]
    assert len(sizes) == info.grid.num_chunks > 1
    assert max(sizes) < info.chunk_bytes
    assert opened.manifest.version == 2
    assert json.loads((saved / "COMMIT").read_text())["version"] == 2


def test_damage_is_found(saved: Path, tmp_path: Path) -> None:
    """A flipped bit, wherever it falls, is damage; so is a file cut off, or empty."""
    folder = tmp_path / saved.name
    assert not mcore_ckpt.verify(saved).problems
    for damage in (lambda d: d[:-5], lambda d: d[: len(d) // 2] + b"\x7f" + d[len(d) // 2 + 1 :]):
        folder = tmp_path / f"step_{len(list(tmp_path.iterdir())):08d}"
        _copy(saved, folder)
        file = min((folder / "model/matrix").glob("c.*"))
        file.write_bytes(damage(file.read_bytes()))
        (problem,) = mcore_ckpt.verify(folder).problems
        assert problem.tensor == "model/matrix"
        with pytest.raises(CheckpointError, match="model/matrix"):
            mcore_ckpt.open(folder)["model/matrix"]
        with pytest.raises(CheckpointError, match="model/matrix"):
            mcore_ckpt.find(folder, scan="full")
        assert mcore_ckpt.find(folder, scan="quick") is not None
        file.write_bytes(b"")
        with pytest.raises(CheckpointError, match="is empty"):
            mcore_ckpt.find(folder, scan="quick")


def _copy(source: Path, target: Path) -> None:
    for file in source.rglob("*"):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            place.write_bytes(file.read_bytes())


def _save_sharded(folder: Path) -> None:
    group = Group.world()
    rows = 90 // group.size
    layout = TensorLayout.whole("model/matrix", (90, 100)).slice(
        0, rows * group.rank, rows * group.rank + rows
    )
    tensors = {"x": LayoutTensor(VALUES["model/matrix"][layout.fragments[0].box.slices], layout)}
    with mcore_ckpt.AsyncSaver(group) as saver:
        saver.save(folder, step=1, tensors=tensors, compression="zstd:1", chunk_bytes=4096)


def test_over_ranks_and_written_again(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same files from another layout; `reshard` takes the compression off and puts it on."""
    ranks.run(_save_sharded, 2, tmp_path / "two")
    matrix = {"model/matrix": VALUES["model/matrix"]}
    one = mcore_ckpt.save(
        tmp_path / "one", step=1, tensors=whole(matrix), compression="zstd:1", chunk_bytes=4096
    )
    two = tmp_path / "two" / one.name
    names = [file.name for file in sorted((one / "model/matrix").iterdir())]
    for name in names:
        assert (one / "model/matrix" / name).read_bytes() == (
            two / "model/matrix" / name
        ).read_bytes()
    assert main(["reshard", str(two), str(tmp_path / "plain")]) == 0
    assert mcore_ckpt.open(tmp_path / "plain").manifest.version == 1
    assert (
        main(["reshard", str(tmp_path / "plain"), str(tmp_path / "b"), "--compression", "blosc"])
        == 0
    )
    again = mcore_ckpt.open(tmp_path / "b")
    assert again.info("model/matrix").codec == Codec("blosc", 5, "lz4")
    assert same(again["model/matrix"], VALUES["model/matrix"])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "b")]) == 0
    assert "blosc:lz4:5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zst", r"compression 'zst' is unknown: 'zstd' or 'blosc' \(nearest zstd\)"),
        ("zstd:99", r"zstd:LEVEL with a level from 1 to 22 \(nearest: 'zstd:22'\)"),
        ("blosc:lz5", r"blosc has no 'lz5' \(nearest lz4\)"),
        ("blosc:zstd:12", r"a level from 0 to 9 \(nearest: 'blosc:zstd:9'\)"),
        ("zstd:3:4", "must be zstd:LEVEL"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mcore_ckpt.save(tmp_path, step=1, tensors={}, compression=text)
    assert not list(tmp_path.iterdir())
    assert str(Codec.parse("blosc")) == "blosc:lz4:5"


def test_plain_files_do_not_take_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="FileEngine writes chunks as they are"):
        mcore_ckpt.save(
            tmp_path, step=1, tensors=whole(VALUES), compression="zstd", engine=FileEngine()
        )
