"""The committed checkpoints of every format version load, now and in every later release."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mcore_ckpt
from mcore_parallel.layout import LayoutTensor, TensorLayout

FIXTURES = Path(__file__).parent / "fixtures"
V1 = FIXTURES / "v1"
FOLDERS = {"v1": "make_v1", "v2-zstd": "make_v2", "v2-blosc": "make_v2"}
Fixture = tuple[Path, ModuleType]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FIXTURES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module", params=FOLDERS)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return FIXTURES / request.param, module(FOLDERS[request.param])


def test_it_is_whole_and_says_what_it_said(fixture: Fixture) -> None:
    folder, made = fixture
    assert not mcore_ckpt.verify(folder).problems
    opened = mcore_ckpt.open(folder)
    assert opened.manifest.version == int(folder.name[1])
    assert opened.step == made.STEP
    assert opened.state == made.STATE
    assert {name: opened.file(name) for name in opened.manifest.files} == made.FILES


def test_every_tensor_opens(fixture: Fixture) -> None:
    folder, made = fixture
    opened = mcore_ckpt.open(folder)
    expected = made.values()
    assert set(opened) == set(expected)
    for name, value in expected.items():
        assert opened[name].dtype == value.dtype, name
        assert torch.equal(bits(opened[name]), bits(value)), name


def test_every_tensor_loads_by_layout(fixture: Fixture) -> None:
    folder, made = fixture
    expected = made.values()
    tensors = {}
    for name, value in expected.items():
        whole = TensorLayout.whole(name, tuple(value.shape))
        for part in range(3):  # as three ranks would hold it
            layout = whole.flat_range(part * whole.numel // 3, (part + 1) * whole.numel // 3)
            local = torch.zeros(layout.shape, dtype=value.dtype)
            tensors[f"{name} {part}"] = LayoutTensor(local, layout)
    mcore_ckpt.load(folder, tensors)
    for name, value in expected.items():
        loaded = torch.cat([bits(tensors[f"{name} {part}"].tensor) for part in range(3)])
        assert torch.equal(loaded, bits(value)), name


def test_this_release_still_writes_it(tmp_path: Path) -> None:
    """As long as the format version is 1, the same tensors give the same arrays."""
    made = module("make_v1")
    tensors = {
        name: LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))
        for name, value in made.values().items()
    }
    mcore_ckpt.save(tmp_path, step=made.STEP, tensors=tensors, chunk_bytes=256)
    for file in (p for p in V1.rglob("*") if p.name == "zarr.json" or p.name.startswith("c.")):
        assert (tmp_path / file.relative_to(V1)).read_bytes() == file.read_bytes(), file


def test_the_fixture_is_never_written_again(fixture: Fixture) -> None:
    with pytest.raises(SystemExit, match="must stay as it is"):
        fixture[1].main()
