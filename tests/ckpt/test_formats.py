"""The pieces of the format: dtypes, names, manifest, and the storage of small files."""

import json
import os
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_ckpt import CheckpointError, FileInfo, LocalStorage, Manifest, TensorInfo
from mcore_ckpt.dtypes import STORED_TYPES, converts, from_numpy, stored_type, to_numpy
from mcore_ckpt.manifest import check_json
from mcore_ckpt.names import check_path, groups_of

PUBLIC = """
AsyncSaver Checkpoint CheckpointError ChunkData Engine FileInfo Found LoadReport LocalStorage
Manifest PendingSave Problem Pruned Region Storage TensorInfo Verification Writing find latest
list_checkpoints load open prune read_state save verify
"""


def test_public_names() -> None:
    assert sorted(mcore_ckpt.__all__) == PUBLIC.split()
    assert all(hasattr(mcore_ckpt, name) for name in mcore_ckpt.__all__)


@pytest.mark.parametrize("name", STORED_TYPES)
def test_every_dtype_goes_to_numpy_and_back(name: str) -> None:
    stored = stored_type(name)
    high = 2 if name == "bool" else 256
    raw = torch.randint(high, (6 * stored.itemsize,), dtype=torch.uint8)
    value = raw.view(stored.torch).view(2, 3)
    array = to_numpy(value)
    assert array.dtype.name == stored.zarr
    back = from_numpy(array, name)
    assert back.dtype == stored.torch
    assert torch.equal(back.contiguous().view(-1).view(torch.uint8), raw)
    assert stored_type(stored.torch) is stored


def test_conversions() -> None:
    assert converts(torch.float32, torch.bfloat16)
    assert converts(torch.bfloat16, torch.float8_e4m3fn)
    assert converts(torch.int64, torch.int64)
    assert not converts(torch.float32, torch.int64)
    assert not converts(torch.int32, torch.int64)
    assert not converts(torch.complex64, torch.float32)


def test_unknown_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match="dtype float4 cannot be stored; the format has float64"):
        stored_type("float4")


def test_names() -> None:
    check_path("layers.0.attention.q.weight", "x")
    check_path("a/b-c_d+e@f/0.1", "x")
    assert groups_of("a/b/c") == ["a", "a/b"]
    assert groups_of("a") == []


def manifest() -> Manifest:
    return Manifest(
        step=7,
        tensors={
            "model/w": TensorInfo(dtype="bfloat16", shape=(5,), chunk_shape=(3,), crc32=(1, 2))
        },
        documents={"zarr.json": 255},
        files={"a": FileInfo(num_bytes=1, sha256="00")},
        state={"x": [1, None]},
        producer={"mcore-ckpt": "0.1.0"},
    )


def test_a_manifest_comes_back() -> None:
    assert Manifest.decode(manifest().encode(), "here") == manifest()
    document = json.loads(manifest().encode())
    assert document["tensors"]["model/w"]["crc32"] == ["00000001", "00000002"]
    assert document["documents"] == {"zarr.json": "000000ff"}
    document["a field of the future"] = 1
    assert Manifest.decode(json.dumps(document).encode(), "here") == manifest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "here has format 'other' version 1; this release"),
        ({"version": "1"}, "version '1'; this release"),
        ({"tensors": {"model/w": {}}}, "here is damaged: KeyError"),
        ({"tensors": []}, "here is damaged"),
        ({"files": {"../up": {"bytes": 1, "sha256": "0"}}}, "damaged: .*'../up' is no path within"),
        ({"tensors": {"model/../../w": {}}}, "damaged: .*'model/../../w' is no path within"),
        ({"documents": {"model/../zarr.json": "00"}}, "damaged: .*is no path within"),
        ({"documents": {"/zarr.json": "00"}}, "damaged: .*is no path within"),
    ],
)
def test_a_bad_manifest(change: dict[str, object], message: str) -> None:
    document = json.loads(manifest().encode()) | change
    with pytest.raises(CheckpointError, match=message):
        Manifest.decode(json.dumps(document).encode(), "here")


def test_a_manifest_with_too_few_checksums() -> None:
    document = json.loads(manifest().encode())
    document["tensors"]["model/w"]["crc32"].pop()
    with pytest.raises(CheckpointError, match="1 checksums for 2 chunks"):
        Manifest.decode(json.dumps(document).encode(), "here")


def test_what_is_no_manifest() -> None:
    for data in (b"", b"[]", b"{}", b"\xff\xfe"):
        with pytest.raises(CheckpointError, match="here is not a checkpoint manifest"):
            Manifest.decode(data, "here")


def test_json_values() -> None:
    assert check_json((1, {"a": (True, None)})) == [1, {"a": [True, None]}]
    with pytest.raises(ValueError, match="state is nan"):
        check_json(float("nan"))


def test_local_storage(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "a" / "b")
    assert storage.entries("") == {}
    storage.make_directory("")
    storage.make_directory("d")
    storage.make_directory("d")
    storage.put("d/file", b"12")
    storage.put("d/file", b"3")
    assert storage.get("d/file") == b"3"
    assert storage.entries("") == {"d": True}
    assert storage.entries("d") == {"file": False}
    storage.rename("d/file", "d/other")
    storage.rename("d", "e")
    storage.sync(["e/other", "e", ""])
    storage.sync(f"e/{name}" for name in ["other"] * 9)
    with pytest.raises(OSError, match="not empty"):
        storage.remove("e")
    storage.remove("e/other")
    storage.remove("e/other")
    storage.remove("e")
    assert os.listdir(tmp_path / "a" / "b") == []
    with pytest.raises(FileNotFoundError):
        storage.get("e/other")
    with pytest.raises(FileNotFoundError):
        storage.sync(["gone"])
