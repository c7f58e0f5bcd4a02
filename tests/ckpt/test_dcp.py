"""Folders of torch.distributed.checkpoint, in and out."""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from mcore_ckpt.dcp import DcpFolder
from mcore_ckpt.dcp.sink import DcpSink
from mcore_ckpt.errors import CheckpointError
from mcore_parallel.group import Group
from mcore_parallel.layout import Box
from mcore_parallel.mapping import TensorMeta


def _torch_load(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        torch_dcp.load(state, checkpoint_id=folder, no_dist=True)


def _values() -> dict[str, torch.Tensor]:
    return {
        "model.a.weight": torch.randn(7, 4),
        "model.b": torch.randn(3, 2, 5).bfloat16(),
        "model.scalar": torch.tensor(2.5),
        "model.empty": torch.empty(0, 4),
        "model.ids": torch.arange(9),
    }


def _sharded(folder: str, value: torch.Tensor) -> None:
    import torch.distributed as dist

    mesh = DeviceMesh("cpu", list(range(Group.world().size)))
    state = {
        "rows": distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(value, mesh, [Shard(1)], src_data_rank=None),
        "note": {"text": "hello", "at": 3},
        "same": torch.ones(2),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=folder)
    dist.barrier()


def test_what_ranks_have_saved_is_read_by_region(ranks: Any, tmp_path: Path) -> None:
    value = torch.randn(7, 6)
    ranks.run(_sharded, 2, str(tmp_path / "x"), value)
    folder = DcpFolder(tmp_path / "x")
    assert set(folder) == {"rows", "columns", "same"}
    assert len(folder.chunks("rows")) == 2
    for name in ("rows", "columns"):
        assert folder.meta(name) == TensorMeta((7, 6), torch.float32)
        for box in (
            Box((0, 0), (7, 6)),
            Box((2, 1), (4, 3)),
            Box((3, 5), (1, 1)),
            Box((0, 0), (0, 6)),
        ):
            assert torch.equal(folder.read(name, box), value[box.slices])
    assert folder.object("note.text") == "hello"
    with pytest.raises(ValueError, match="leaves the shape"):
        folder.read("rows", Box((6, 0), (2, 6)))


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    values = _values()
    announced = {
        tuple(n.split(".", 1)): TensorMeta(tuple(v.shape), v.dtype) for n, v in values.items()
    }
    objects = {("state",): json.dumps({"step": 3})}
    sink = DcpSink(tmp_path / "x", announced, objects=objects, max_file_bytes=100)
    with sink:
        for name, value in values.items():
            sink.write(name, value)
        with pytest.raises(ValueError, match="written twice"):
            sink.write("model.b", values["model.b"])
        assert not (tmp_path / "x").exists()
    assert len(list((tmp_path / "x").glob("*.distcp"))) > 2
    nested = {"model": {n[6:]: torch.zeros_like(v) for n, v in values.items()}, "state": ""}
    _torch_load(nested, tmp_path / "x")
    for name, value in values.items():
        assert torch.equal(nested["model"][name[6:]], value)  # type: ignore[index]
    assert json.loads(nested["state"]) == {"step": 3}  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "x", tmp_path / "x.pt")
    whole = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(whole["model"]["a.weight"], values["model.a.weight"])
    folder = DcpFolder(tmp_path / "x")
    assert {name: folder.meta(name) for name in folder} == {
        ".".join(path): meta for path, meta in announced.items()
    }
    for name, value in values.items():
        assert torch.equal(folder.read(name), value)


def test_nothing_is_there_after_an_error(tmp_path: Path) -> None:
    announced = {("a",): TensorMeta((2,), torch.float32)}
    with (
        pytest.raises(ValueError, match="a was announced and not written"),
        DcpSink(tmp_path / "x", announced),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "file").write_text("")
    with pytest.raises(ValueError, match="is not empty"):
        DcpSink(tmp_path / "x", announced)
    with pytest.raises(ValueError, match="the least is 1"):
        DcpSink(tmp_path / "y", announced, max_file_bytes=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with DcpSink(tmp_path / "x", {("a",): TensorMeta((8, 2), torch.float32)}) as sink:
        sink.write("a", torch.randn(8, 2))
    return tmp_path / "x"


def test_damage_is_named(folder: Path) -> None:
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        DcpFolder(folder).read("a")
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        DcpFolder(folder).read("a")
    described = folder / ".metadata"
    described.write_bytes(described.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        DcpFolder(folder)
    described.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \.metadata"):
        DcpFolder(folder)


@pytest.mark.parametrize("what", ["outside", "gap", "transformed", "another"])
def test_what_metadata_says_is_checked(what: str, folder: Path) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    _, stored = next(iter(metadata.storage_data.items()))
    tensor = metadata.state_dict_metadata["a"]
    message = {
        "outside": "outside of the folder",
        "gap": "only 16 of 32 elements are stored",
        "transformed": "stored through",
        "another": "is not the torch.float32 of shape",
    }[what]
    if what == "outside":
        stored.relative_path = "../x/__0_0.distcp"
    elif what == "gap":
        tensor.size = torch.Size([16, 2])
    elif what == "transformed":
        stored.transform_descriptors = ["zstd"]
    else:
        tensor.chunks[0].sizes = torch.Size([7, 2])
        tensor.size = torch.Size([7, 2])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=message):
        DcpFolder(folder).read("a")
