"""Files of torch.save, read without running them."""

import argparse
import collections
import io
import os
import pickle
import types
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.torchfile import Inert, Mapped, fields, load_archive, load_file, load_pickle


def _saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b) and type(a) is type(b)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
     torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn],
)  # fmt: skip
def test_tensors_are_those_that_were_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
    value = {"whole": whole, "columns": whole.t()[1:3], "empty": whole[:0], "one": whole[1, 2]}
    found = load_file(_saved(tmp_path / "x.pt", value))
    assert all(torch.equal(found[name].float() if dtype.itemsize == 1 else found[name],
                           value[name].float() if dtype.itemsize == 1 else value[name])
               for name in value)  # fmt: skip
    assert {v.dtype for v in found.values()} == {dtype}
    assert found["whole"].data_ptr() + whole.element_size() == found["columns"].data_ptr()


def test_values_of_training_state_come_back(tmp_path: Path) -> None:
    """U49: the argument namespace, and what else such files hold, load by the safe reader."""
    value = {
        "args": argparse.Namespace(lr=1e-3, layers=2, dtype=torch.bfloat16, betas=(0.9, 0.95)),
        "simple": types.SimpleNamespace(a=1),
        "rng": np.random.RandomState(1).get_state(),
        "numbers": [np.float64(1.5), np.int64(3), np.array([1, 2], dtype="<u2"), 1 + 2j],
        "ordered": collections.OrderedDict(a=torch.ones(2)),
        "default": collections.defaultdict(list, {"k": [1]}),
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "size": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "none": None,
    }
    found = load_file(_saved(tmp_path / "x.pt", value))
    parameter = found.pop("parameter")
    assert torch.equal(parameter, value.pop("parameter"))
    assert found["ordered"].pop("a").tolist() == value["ordered"].pop("a").tolist()
    assert _is_same(found, value)
    assert fields(found["args"])["dtype"] == torch.bfloat16
    stream = io.BytesIO()
    pickle.dump(Path("a/b"), stream)
    assert load_pickle(io.BytesIO(stream.getvalue()), "x") == PurePosixPath("a/b")


class _Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class _Builds:
    def __reduce__(self) -> Any:
        return eval, ("__import__('os').getpid()",)


@pytest.mark.parametrize("kind", ["system", "eval", "getattr"])
def test_nothing_is_run(kind: str, tmp_path: Path) -> None:
    """U49: an allow-list alone: whatever else a file names is refused, by name."""
    mark = tmp_path / "ran"
    path = tmp_path / "x.pt"
    if kind == "getattr":
        data = b"cbuiltins\ngetattr\n(ctorch\nSize\nX\x05\x00\x00\x00countt\x85R."
        with pytest.raises(CheckpointError):
            load_pickle(io.BytesIO(data), "x")
        return
    torch.save(
        {"w": torch.ones(1), "x": _Runs(f"touch {mark}") if kind == "system" else _Builds()}, path
    )
    with pytest.raises(CheckpointError, match=r"x\.pt: it names (posix\.system|builtins\.eval)"):
        load_file(path)
    assert not mark.exists()


def test_classes_that_are_not_looked_up_are_inert(tmp_path: Path) -> None:
    """A class of a package that need not be there: its state can be read, and none of it runs."""
    data = (
        b"\x80\x02cmegatron.core.transformer.enums\nAttnBackend\nK\x05\x85R}(X\x01\x00\x00\x00a"
        b"K\x01ub."
    )
    found = load_pickle(io.BytesIO(data), "x")
    assert isinstance(found, Inert)
    assert found.name == "megatron.core.transformer.enums.AttnBackend"
    assert found.args == (5,)
    assert fields(found) == {"a": 1}
    assert "AttnBackend(5" in repr(found)


def test_a_part_of_a_file_is_read_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "x"
    spans = []
    with path.open("wb") as file:
        file.write(b"abc")
        for i in range(3):
            start = file.tell()
            torch.save(torch.full((5,), float(i)), file)
            spans.append((start, file.tell()))
    mapped = Mapped(path)
    for i, (start, stop) in enumerate(spans):
        assert load_archive(mapped, start, stop).tolist() == [float(i)] * 5


@pytest.mark.parametrize("damage", ["cut", "flipped", "short", "empty", "missing", "text"])
def test_damage_is_named(damage: str, tmp_path: Path) -> None:
    path = _saved(tmp_path / "x.pt", {"w": torch.arange(100)})
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":  # the offset in a storage that the pickle has
        at = data.index(b"data.pkl") + 8
        data[at : at + 40] = bytes(40)
        path.write_bytes(data)
    elif damage == "short":
        path.write_bytes(data[:3])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("no archive")
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        load_file(path)
