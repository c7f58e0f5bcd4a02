"""A manifest that claims what cannot be, and tensors of which chunks are not there."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

import mcore_ckpt
from mcore_ckpt.cli import main
from mcore_ckpt.memory import check_room
from mcore_parallel.layout import LayoutTensor, TensorLayout

NAME = "model/x"
MANY = 10**15
"""Elements. Of four bytes they are more than any machine has, and than a manifest may not claim."""


def save(directory: Path, **options: Any) -> Path:
    """A tensor of [64, 32] in eight chunks."""
    x = LayoutTensor(torch.arange(2048.0).view(64, 32), TensorLayout.whole(NAME, (64, 32)))
    return Path(
        mcore_ckpt.save(directory, step=1, tensors={"x": x}, state={}, chunk_bytes=1024, **options)
    )


def claim(step: Path, **fields: Any) -> None:
    """Have the manifest say something else of the tensor, and the marker vouch for it."""
    manifest = json.loads((step / "manifest.json").read_bytes())
    manifest["tensors"][NAME].update(fields)
    vouch(step, manifest)


def vouch(step: Path, manifest: Mapping[str, Any]) -> None:
    data = json.dumps(manifest).encode()
    (step / "manifest.json").write_bytes(data)
    marker = json.loads((step / "COMMIT").read_bytes())
    marker |= {"manifest_bytes": len(data), "manifest_sha256": hashlib.sha256(data).hexdigest()}
    (step / "COMMIT").write_text(json.dumps(marker))


def line_of(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status, and the line that says what is wrong."""
    status = main(command)
    out, err = capsys.readouterr()
    assert (err or out).count("\n") <= (1 if err else 2)
    return status, err or out


SIZES: dict[str, Mapping[str, Any]] = {
    "more chunks than checksums": {"shape": [MANY], "chunk_shape": [10**6]},
    "no number of bytes": {"shape": [10**20], "chunk_shape": [10**20], "crc32": ["00000000"]},
    "files larger than the tensor": {"file_shape": [64 * 10**9, 32]},
    "half a chunk in a file": {"file_shape": [24, 32]},
    "another number of dimensions": {"chunk_shape": [16]},
    "a fraction": {"shape": [64.5, 32]},
    "below zero": {"shape": [-64, -32]},
    "empty chunks": {"chunk_shape": [0, 16]},
    "no list": {"shape": "64"},
    "yes and no": {"shape": [True, 32]},
}


@pytest.mark.parametrize("fields", SIZES.values(), ids=SIZES)
def test_sizes_that_cannot_be_are_damage_that_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: Mapping[str, Any]
) -> None:
    step = save(tmp_path)
    claim(step, **fields)
    for command in (["inspect", str(step)], ["diff", str(step), str(step)]):
        status, line = line_of(command, capsys)
        assert status == 2
        assert line.startswith(f"mcore-ckpt: {step}/manifest.json is damaged: ")
    status, line = line_of(["verify", str(step)], capsys)
    assert status == 1
    assert "manifest.json is damaged" in line
    target = LayoutTensor(torch.zeros(1, 32), TensorLayout.whole(NAME, (64, 32)).slice(0, 0, 1))
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"manifest\.json is damaged"):
        mcore_ckpt.load(step, {"x": target})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "1"),
        ("step", -1),
        ("step", 1.0),
        ("state", ["a"]),
        ("producer", "me"),
        ("files", {"a": {"bytes": "7", "sha256": ""}}),
        ("documents", [1]),
        ("tensors", None),
        ("version", 2**40),
    ],
)
def test_fields_of_another_kind_are_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    step = save(tmp_path)
    manifest = json.loads((step / "manifest.json").read_bytes())
    vouch(step, {**manifest, field: value})
    for command in (["inspect"], ["diff", str(step)], ["reshard", str(tmp_path / "new")]):
        status, line = line_of([command[0], str(step), *command[1:]], capsys)
        assert status == 2
        assert line.startswith(f"mcore-ckpt: {step}/manifest.json ")
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"manifest\.json"):
        mcore_ckpt.find(step)
    vouch(step, manifest)
    assert mcore_ckpt.open(step).step == 1


# One chunk that its one checksum fits: nothing but memory says that it cannot be.
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_tensor_larger_than_memory_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compression: str | None
) -> None:
    step = save(tmp_path, compression=compression)
    claim(step, shape=[MANY], chunk_shape=[MANY], crc32=["00000000"])
    (step / NAME / "c.0.0").rename(step / NAME / "c.0")
    assert main(["inspect", str(step)]) == 0
    assert capsys.readouterr().out.count("3638.0 TiB") == 3
    said = f"tensor {NAME} [{MANY}] takes {4 * MANY} bytes of memory, more than can be had here"
    new = str(tmp_path / "new")
    for command in (
        ["diff", str(step), str(step)],
        ["reshard", str(step), new],
        ["average", str(step), str(step), "--to", new],
    ):
        assert line_of(command, capsys) == (2, f"mcore-ckpt: {step}: {said}\n")
    assert not list((tmp_path / "new").iterdir())
    status, line = line_of(["verify", str(step)], capsys)
    assert status == 1
    what = f"has 1024 bytes instead of {4 * MANY}" if compression is None else "cannot be decoded"
    assert what in line
    whole = TensorLayout.whole(NAME, (MANY,))
    for verify in (True, False):
        target = LayoutTensor(torch.zeros(1), whole.slice(0, 5, 6))
        with pytest.raises(mcore_ckpt.CheckpointError, match="more than can be had here"):
            mcore_ckpt.load(step, {"x": target}, verify=verify)


def test_what_fits_into_memory_is_let_through() -> None:
    check_room(300 << 20, "this")
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"^this takes"):
        check_room(2**70, "this")


# Other tools leave out chunks of zeros when they write; here such a chunk is damage.
@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"file_bytes": 4096}], ids=str)
def test_chunks_that_another_tool_left_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    step, whole = save(tmp_path / "run", **options), save(tmp_path / "whole")
    zarr.open_group(step, mode="r+")[NAME][16:32] = 0.0
    chunk = rf"tensor {NAME} chunk \[1, 0\]: |cannot read chunk \S*{NAME}/c"
    assert main(["verify", str(step)]) == 1
    assert f"tensor {NAME} chunk [1, 0]: " in capsys.readouterr().out
    status, line = line_of(["diff", str(whole), str(step)], capsys)
    assert status == 2
    assert NAME in line
    target = LayoutTensor(torch.zeros(2, 32), TensorLayout.whole(NAME, (64, 32)).slice(0, 20, 22))
    for verify in (True, False):
        with pytest.raises(mcore_ckpt.CheckpointError, match=chunk):
            mcore_ckpt.load(step, {"x": target}, verify=verify)
    rest = LayoutTensor(torch.zeros(32, 32), TensorLayout.whole(NAME, (64, 32)).slice(0, 32, 64))
    if "file_bytes" not in options:  # what was not touched is there as before
        mcore_ckpt.load(step, {"x": rest})
        assert rest.tensor[0, 0] == 1024
