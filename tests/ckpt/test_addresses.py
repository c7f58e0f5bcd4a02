"""Checkpoints by address: from text to a storage, and what functions and commands do with it."""

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import mcore_ckpt
from mcore_ckpt.addresses import Address, local_path, place, storage_at
from mcore_ckpt.cli import main
from mcore_ckpt.fsspec_storage import FsspecStorage
from mcore_ckpt.kv_storage import KvStorage
from mcore_ckpt.local import save_local
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.testing import RankPool

SHAPE = (20, 35)
KINDS = ["memory", "fsspec+file", "tensorstore+file"]


@pytest.fixture(params=KINDS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    slash = "" if request.param == "memory" else "/"
    yield f"{request.param}://{slash}{str(tmp_path)[1:]}/run"
    fsspec.filesystem("memory").store.clear()


def tensors(step: int) -> dict[str, LayoutTensor]:
    values = {
        "model/matrix": torch.arange(700.0).view(SHAPE) + step,
        "exp_avg/scalar": torch.tensor(float(step)),
    }
    return {
        name: LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))
        for name, value in values.items()
    }


def save(address: str, *steps: int, **options: Any) -> None:
    for step in steps:
        mcore_ckpt.save(
            address, step=step, tensors=tensors(step), state={"at": step}, chunk_bytes=1024,
            files={"a/b": b"text"}, **options,
        )  # fmt: skip


def test_an_address_is_text_that_goes_on_like_a_path() -> None:
    at = place("s3://bucket/run/")
    assert isinstance(at, Address)
    assert str(at / "step_00000001") == "s3://bucket/run/step_00000001"
    assert ((at / "x").name, (at / "x").parent) == ("x", at)
    assert (at.parent, at.parent.parent, at.parent.name) == (
        "s3://bucket", "s3://bucket", "bucket"
    )  # fmt: skip
    assert place("memory://") / "x" == "memory://x"
    assert place("some/run") == Path("some/run")
    assert place("file:///some/a%20run") == Path("/some/a run")
    assert json.loads(json.dumps({"at": at})) == {"at": "s3://bucket/run"}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("s3://bucket/run", KvStorage),
        ("gs://bucket/run", KvStorage),
        ("tensorstore+s3://bucket/run", KvStorage),
        ("memory://bucket/run", FsspecStorage),
        ("fsspec+file:///run", FsspecStorage),
        ("file:///run", mcore_ckpt.LocalStorage),
        ("run", mcore_ckpt.LocalStorage),
    ],
)
def test_which_storage_an_address_has(text: str, kind: type) -> None:
    assert type(storage_at(text)) is kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s4://bucket/run", "s4://bucket/run: unknown scheme s4://, nearest valid is s3://"),
        ("S3://bucket/run", "unknown scheme S3://, nearest valid is s3://"),
        ("memry://run", "nearest valid is memory://"),
        ("s3:/bucket/run", "has lost a slash: nearest valid is s3://bucket/run"),
        (Path("s3://bucket/run"), "has lost a slash: nearest valid is s3://bucket/run"),
        ("file://run", "file://run names no path: nearest valid is file:///run"),
        ("://run", "no address: nearest valid is s3://run"),
        ("cache::s3://run", "no address: nearest valid is s3://run"),
        ("s3://", "s3:// cannot be opened"),
        ("tensorstore+az://bucket", "cannot be opened: .*unsupported URL scheme"),
        ("az://bucket/run", "cannot be opened: .*adlfs"),
    ],
)
def test_what_is_no_address_is_told_in_one_line(text: str | Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        mcore_ckpt.save(text, step=1, tensors=tensors(1))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        mcore_ckpt.latest(text)


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs nothing more still opens; the rest says what to install."""
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name == "mcore_ckpt.fsspec_storage":
            raise ImportError("no fsspec")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert isinstance(storage_at("s3://bucket/run"), KvStorage)
    with pytest.raises(ValueError, match=r"az:// goes through fsspec.* install 'mcore-ckpt.fsspec"):
        storage_at("az://bucket/run")
    with pytest.raises(ValueError, match="nearest valid is s3://bucket"):
        place("s3:/bucket")


def test_functions(address: str) -> None:
    assert mcore_ckpt.latest(address) is None
    assert mcore_ckpt.find(address) is None
    save(address, 1, 2, 3, keep_last=2)
    listed = [f"{address}/step_0000000{i}" for i in (2, 3)]
    assert mcore_ckpt.list_checkpoints(address) == listed
    assert mcore_ckpt.latest(address) == listed[-1]
    for path in (address, f"{address}/", Address(address), *listed):
        found = mcore_ckpt.find(path, scan="full")
        assert found is not None
        assert found.path in listed
        opened = mcore_ckpt.open(path)
        assert opened.path == found.path
        assert torch.equal(opened["model/matrix"], tensors(found.step)["model/matrix"].tensor)
        assert mcore_ckpt.read_state(path) == {"at": found.step}
        into = tensors(0)
        mcore_ckpt.load(found.path, into, scan="quick")
        assert torch.equal(into["model/matrix"].tensor, opened["model/matrix"])
        assert mcore_ckpt.verify(path).path == found.path
    assert mcore_ckpt.prune(address, keep_last=1).removed == (listed[0],)
    with mcore_ckpt.AsyncSaver() as saver:
        assert saver.save(address, step=4, tensors=tensors(4)).wait() == f"{address}/step_00000004"
    storage = storage_at(address)
    storage.put("step_00000005/UNCOMMITTED", b"")
    with pytest.raises(FileNotFoundError, match="step_00000005 was never committed"):
        mcore_ckpt.load(f"{address}/step_00000005", tensors(0))
    with pytest.raises(FileNotFoundError, match=r"no committed checkpoint at .*/none"):
        mcore_ckpt.open(f"{address}/none")
    assert mcore_ckpt.latest(address) == f"{address}/step_00000004"


def test_commands(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(address, 1, 2)
    here = tmp_path / "here"

    def run(*argv: str, status: int = 0) -> str:
        assert main([*argv]) == status, capsys.readouterr()
        out = capsys.readouterr()
        return out.out if status < 2 else out.err

    assert json.loads(run("inspect", address, "--json"))["path"] == f"{address}/step_00000002"
    assert f"{address}/step_00000002: whole" in run("verify", address)
    assert "different" in run("diff", address, f"{address}/step_00000001", status=1)
    copied = run("reshard", address, f"{address}/copy", "--compression", "zstd")
    assert copied.startswith(f"{address}/copy/step_00000002: 2 tensors")
    run("reshard", f"{address}/copy", str(here))
    assert "same" in run("diff", str(here), address)
    run("average", address, f"{address}/step_00000001", "--to", f"{address}/mean")
    mean = mcore_ckpt.open(f"{address}/mean")["model/matrix"]
    assert torch.equal(mean, tensors(1)["model/matrix"].tensor + 0.5)
    err = run("reshard", str(here), f"{address}/copy", status=2)
    assert err == (
        f"mcore-ckpt: {address}/copy is not empty: give an address with nothing below it\n"
    )
    pruned = json.loads(run("prune", address, "--keep-last", "1", "--json"))
    assert pruned["removed"] == [f"{address}/step_00000001"]
    err = run("convert", "--from", "native", address, "--to", "hf", f"{address}/hf", status=2)
    assert err.startswith(f"mcore-ckpt: {address}/hf is an address: give a directory")
    err = run("convert", "--from", "auto", address, "--to", "native", f"{address}/new", status=2)
    assert err == f"mcore-ckpt: {address}/step_00000002 has no model architecture in its state\n"
    chunk = "step_00000002/model/matrix/c.0.0"
    storage = storage_at(address)
    data = storage.get(chunk)
    storage.put(chunk, bytes([data[0] ^ 1]) + data[1:])
    assert "tensor model/matrix chunk [0, 0]" in run("verify", address, status=1)
    err = run("bench", "--directory", "memory://x", status=2)
    assert err.startswith("mcore-ckpt: memory://x is an address: give a directory")
    err = run("inspect", "s4://x", status=2)
    assert err == "mcore-ckpt: s4://x: unknown scheme s4://, nearest valid is s3://\n"


def test_what_is_of_directories_takes_no_address(tmp_path: Path) -> None:
    """Nothing called `memory:` is made in the working directory."""
    with pytest.raises(ValueError, match="memory://x is an address: give a directory"):
        local_path("memory://x")
    with pytest.raises(ValueError, match="memory://x is an address: give a directory"):
        save_local("memory://x", step=1, tensors=tensors(1))


def save_and_load(address: str) -> None:
    """Rows are saved, twice, and columns loaded."""
    group = Group.world()
    whole, layout = torch.arange(700.0).view(SHAPE), TensorLayout.whole("model/matrix", SHAPE)
    a, b = group.rank * 20 // group.size, (group.rank + 1) * 20 // group.size
    for step in (1, 2):
        rows = LayoutTensor(whole[a:b] + step, layout.slice(0, a, b))
        mcore_ckpt.save(
            address, step=step, tensors={"x": rows}, group=group, chunk_bytes=512, keep_last=1
        )
    found = mcore_ckpt.find(address, group, scan="full")
    assert found is not None
    assert found.path == f"{address}/step_00000002"
    a, b = group.rank * 35 // group.size, (group.rank + 1) * 35 // group.size
    columns = LayoutTensor(torch.zeros(20, b - a), layout.slice(1, a, b))
    mcore_ckpt.load(found.path, {"y": columns}, group)
    assert torch.equal(columns.tensor, (whole + 2)[:, a:b])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_several_ranks(ranks: RankPool, kind: str, tmp_path: Path) -> None:
    address = f"{kind}://{tmp_path}/run"
    ranks.run(save_and_load, 3, address)
    assert mcore_ckpt.list_checkpoints(address) == [f"{address}/step_00000002"]
    assert list(storage_at(address).entries("")) == ["step_00000002"]
    with pytest.raises(ValueError, match="nearest valid is memory"):
        ranks.run(save_and_load, 2, "memry://x")
