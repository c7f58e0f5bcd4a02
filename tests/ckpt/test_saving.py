"""What can be saved, and what is refused in one clear line."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_parallel.layout import LayoutTensor, TensorLayout


def whole(name: str, value: torch.Tensor) -> LayoutTensor:
    return LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))


def save(directory: Path, tensors: dict[str, LayoutTensor], **more: Any) -> Path:
    return mcore_ckpt.save(directory, **{"step": 1, "tensors": tensors, **more})


def test_no_tensors_at_all(tmp_path: Path) -> None:
    path = save(tmp_path, {}, state={"only": "state"})
    assert len(mcore_ckpt.open(path)) == 0
    assert mcore_ckpt.read_state(path) == {"only": "state"}
    assert mcore_ckpt.load(path, {}).step == 1
    assert not mcore_ckpt.verify(path).problems


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_from_a_device_and_back(tmp_path: Path, device: str) -> None:
    value = torch.arange(60.0).view(6, 10)
    on_device = {
        "w": whole("model/w", value.to(device)),
        "b": whole("model/b", value.to(device, torch.bfloat16)),
    }
    path = save(tmp_path, on_device, chunk_bytes=64)
    back = {
        "w": whole("model/w", torch.zeros(6, 10, device=device)),
        "b": whole("model/b", torch.zeros(6, 10, device=device, dtype=torch.float16)),
    }
    mcore_ckpt.load(path, back)
    assert torch.equal(back["w"].tensor.cpu(), value)
    assert torch.equal(back["b"].tensor.cpu(), value.half())


def test_parameters_and_non_contiguous_tensors(tmp_path: Path) -> None:
    value = torch.arange(6.0).view(2, 3)
    tensors = {
        "p": whole("model/p", torch.nn.Parameter(value.clone())),
        "t": whole("model/t", value.T),
    }
    opened = mcore_ckpt.open(save(tmp_path, tensors))
    assert torch.equal(opened["model/p"], value)
    assert torch.equal(opened["model/t"], value.T)


def test_lazily_conjugated_and_negated(tmp_path: Path) -> None:
    """What is stored is what the tensor shows, in the background and of whole chunks, too."""
    value = torch.tensor([1 + 2j, 3 - 4j])
    shown = {"model/conj": value.conj(), "model/neg": value.conj().imag}
    assert shown["model/conj"].is_conj()
    assert shown["model/neg"].is_neg()
    save(tmp_path, {name: whole(name, tensor) for name, tensor in shown.items()})
    with mcore_ckpt.AsyncSaver() as saver:
        tensors = {name: whole(name, tensor) for name, tensor in shown.items()}
        saver.save(tmp_path, step=9, tensors=tensors)
    for path in mcore_ckpt.list_checkpoints(tmp_path):
        opened = mcore_ckpt.open(path)
        for name, tensor in shown.items():
            assert opened[name].tolist() == tensor.tolist()


def test_tensors_without_elements_in_memory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w is on the meta device and has no values"):
        save(tmp_path, {"w": whole("model/w", torch.zeros(2, device="meta"))})
    with pytest.raises(ValueError, match=r"w is torch.sparse_coo: save its dense form"):
        save(tmp_path, {"w": whole("model/w", torch.eye(2).to_sparse())})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weight", "has no prefix: nearest valid is 'model/weight'"),
        ("files/weight", "the prefix 'files' is reserved"),
        ("model/../escape", "'\\.\\.' is not"),
        ("model//w", "'' is not"),
        ("model/a b", "'a b' is not"),
        ("model/zarr.json", "reserved by zarr"),
        ("model/__w", "reserved by zarr"),
    ],
)
def test_names_that_cannot_be_stored(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save(tmp_path, {"w": whole(name, torch.zeros(2))})
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_a_prefix_of_another(tmp_path: Path) -> None:
    tensors = {"a": whole("model/a", torch.zeros(2)), "b": whole("model/a/b", torch.zeros(2))}
    with pytest.raises(ValueError, match="'model/a' is a tensor and a prefix of"):
        save(tmp_path, tensors)


def test_conflicting_claims_are_refused(tmp_path: Path) -> None:
    """U46: two tensors that both claim to be all of one global tensor, and no replicas."""
    tensors = {
        "mine": whole("model/same", torch.tensor([0.0, 1.0])),
        "yours": whole("model/same", torch.tensor([2.0, 3.0])),
    }
    with pytest.raises(ValueError, match=r"model/same \[2\]: elements \[0:2\] are held twice"):
        save(tmp_path, tensors)


def test_a_hole_is_refused(tmp_path: Path) -> None:
    part = TensorLayout.whole("model/w", (4, 3)).slice(0, 0, 3)
    with pytest.raises(ValueError, match=r"model/w \[4, 3\]: elements \[3:4, 0:3\] are missing"):
        save(tmp_path, {"w": LayoutTensor(torch.zeros(3, 3), part)})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"best": float("inf")}, r"state\['best'\] is inf, and JSON has no such number"),
        ({"a": [1, {"b": {3}}]}, r"state\['a'\]\[1\]\['b'\] is a set"),
        ({"a": {1: 2}}, r"state\['a'\] has the key 1; JSON keys are strings"),
        ({"a": torch.zeros(1)}, r"state\['a'\] is a Tensor"),
    ],
)
def test_state_that_is_not_json(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save(tmp_path, {}, state=state)


def test_state_comes_back_exactly(tmp_path: Path) -> None:
    state = {
        "large": 2**70,
        "float": 0.1 + 0.2,
        "text": "ü\n\u2028",
        "deep": [[], {}, [None, True, -1.5e-300]],
        "tuple": (1, 2),
    }
    path = save(tmp_path, {}, state=state)
    assert mcore_ckpt.read_state(path) == {**state, "tuple": [1, 2]}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"step": -1}, "step -1 must be a whole number from 0 on"),
        ({"step": True}, "step True must be a whole number from 0 on"),
        ({"state": [1]}, "state is a list; it is a mapping"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0; nearest valid: 1"),
        ({"exchange_bytes": 0}, "exchange_bytes is 0; nearest valid: 1"),
    ],
)
def test_arguments(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save(tmp_path, {}, **more)


def test_files(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    (source / "sub").mkdir(parents=True)
    (source / "model.bin").write_bytes(b"\x00\x01")
    (source / "sub" / "vocab.txt").write_text("a b")
    files = {"tokenizer": source, "config.json": b"{}", "copy.txt": source / "sub" / "vocab.txt"}
    opened = mcore_ckpt.open(save(tmp_path / "run", {}, files=files))
    assert {name: opened.file(name) for name in opened.manifest.files} == {
        "config.json": b"{}",
        "copy.txt": b"a b",
        "tokenizer/model.bin": b"\x00\x01",
        "tokenizer/sub/vocab.txt": b"a b",
    }
    with pytest.raises(ValueError, match=r"file name '\.\./x'"):
        save(tmp_path / "run", {}, files={"../x": b""})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        save(tmp_path / "run", {}, files={"x": tmp_path / "nowhere"})
    with pytest.raises(ValueError, match=r"two attached files are called 'tokenizer/model\.bin'"):
        save(tmp_path / "run", {}, files={"tokenizer": source, "tokenizer/model.bin": b""})
    for files in ({"a": b"", "a/b": b""}, {"a/b": b"", "a": b""}):
        with pytest.raises(ValueError, match="'a' is an attached file, and a directory in 'a/b'"):
            save(tmp_path / "run", {}, files=files)


def test_a_failed_save_leaves_the_older_one_and_no_rubbish(tmp_path: Path) -> None:
    good = save(tmp_path, {"w": whole("model/w", torch.ones(3))})
    (tmp_path / "step_00000002").write_text("a file in the way")
    with pytest.raises(ValueError, match=r"step_00000002 is in the way and no directory"):
        save(tmp_path, {"w": whole("model/w", torch.zeros(3))}, step=2)
    assert mcore_ckpt.latest(tmp_path) == good
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
