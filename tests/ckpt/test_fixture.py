"""The committed checkpoint of format version 1 loads, now and in every later release."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mcore_ckpt
from mcore_parallel.layout import LayoutTensor, TensorLayout

FIXTURES = Path(__file__).parent / "fixtures"
V1 = FIXTURES / "v1"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_v1", FIXTURES / "make_v1.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_whole_and_says_what_it_said(made: ModuleType) -> None:
    assert not mcore_ckpt.verify(V1).problems
    opened = mcore_ckpt.open(V1)
    assert opened.step == made.STEP
    assert opened.state == made.STATE
    assert {name: opened.file(name) for name in opened.manifest.files} == made.FILES


def test_every_tensor_opens(made: ModuleType) -> None:
    opened = mcore_ckpt.open(V1)
    expected = made.values()
    assert set(opened) == set(expected)
    for name, value in expected.items():
        assert opened[name].dtype == value.dtype, name
        assert torch.equal(bits(opened[name]), bits(value)), name


def test_every_tensor_loads_by_layout(made: ModuleType) -> None:
    expected = made.values()
    tensors = {}
    for name, value in expected.items():
        whole = TensorLayout.whole(name, tuple(value.shape))
        for part in range(3):  # as three ranks would hold it
            layout = whole.flat_range(part * whole.numel // 3, (part + 1) * whole.numel // 3)
            local = torch.zeros(layout.shape, dtype=value.dtype)
            tensors[f"{name} {part}"] = LayoutTensor(local, layout)
    mcore_ckpt.load(V1, tensors)
    for name, value in expected.items():
        loaded = torch.cat([bits(tensors[f"{name} {part}"].tensor) for part in range(3)])
        assert torch.equal(loaded, bits(value)), name


def test_this_release_still_writes_it(made: ModuleType, tmp_path: Path) -> None:
    """As long as the format version is 1, the same tensors give the same arrays."""
    tensors = {
        name: LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))
        for name, value in made.values().items()
    }
    mcore_ckpt.save(tmp_path, step=made.STEP, tensors=tensors, chunk_bytes=256)
    for file in (p for p in V1.rglob("*") if p.name == "zarr.json" or p.name.startswith("c.")):
        assert (tmp_path / file.relative_to(V1)).read_bytes() == file.read_bytes(), file


def test_the_fixture_is_never_written_again(made: ModuleType) -> None:
    with pytest.raises(SystemExit, match="must stay as it is"):
        made.main()
