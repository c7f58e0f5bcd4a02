"""Loading: strictness, prefixes, dtypes, padding, and that nothing is unpickled."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import mcore_ckpt
from mcore_parallel.layout import LayoutTensor, TensorLayout


def whole(name: str, value: torch.Tensor) -> LayoutTensor:
    return LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {
        "a": whole("model/a", torch.arange(12.0).view(3, 4)),
        "b": whole("model/b", torch.arange(4)),
        "m": whole("exp_avg/a", torch.ones(3, 4)),
    }
    return mcore_ckpt.save(
        tmp_path, step=5, tensors=tensors, state={"consumed": 40, "x": [1, None]}
    )


def test_state_and_step(path: Path) -> None:
    assert mcore_ckpt.read_state(path) == {"consumed": 40, "x": [1, None]}
    assert mcore_ckpt.read_state(path.parent) == mcore_ckpt.open(path).state
    assert mcore_ckpt.open(path).step == 5


def test_opening_as_a_mapping(path: Path) -> None:
    opened = mcore_ckpt.open(path)
    assert sorted(opened) == ["exp_avg/a", "model/a", "model/b"]
    assert len(opened) == 3
    assert "model/a" in opened
    assert "model/c" not in opened
    assert opened.info("model/a").shape == (3, 4)
    assert "step 5, 3 tensors" in repr(opened)
    with pytest.raises(KeyError):
        opened["model/c"]


def test_everything_that_does_not_fit_is_named(path: Path) -> None:
    tensors = {
        "a": whole("model/a", torch.zeros(4, 3)),
        "b": whole("model/b", torch.zeros(4)),
        "c": whole("model/c", torch.zeros(2)),
    }
    with pytest.raises(ValueError, match="step_00000005 does not fit") as caught:
        mcore_ckpt.load(path, tensors)
    message = str(caught.value)
    assert "1 missing: model/c" in message
    assert "1 unexpected: exp_avg/a" in message
    assert "model/a (checkpoint [3, 4], here [4, 3])" in message
    assert "model/b (checkpoint int64, here float32)" in message
    assert "\n" not in message


def test_warning_loads_the_rest(path: Path) -> None:
    tensors = {
        "a": whole("model/a", torch.zeros(3, 4)),
        "b": whole("model/b", torch.full((5,), 7)),
        "c": whole("model/c", torch.full((2,), 7.0)),
    }
    with pytest.warns(RuntimeWarning, match="1 missing: model/c; 1 unexpected: exp_avg/a; 1 mism"):
        report = mcore_ckpt.load(path, tensors, strict="warn")
    assert report.missing == ("model/c",)
    assert report.unexpected == ("exp_avg/a",)
    assert report.mismatched == ("model/b (checkpoint [4], here [5])",)
    assert torch.equal(tensors["a"].tensor, torch.arange(12.0).view(3, 4))
    assert (tensors["b"].tensor == 7).all()
    assert (tensors["c"].tensor == 7).all()


def test_an_unknown_strictness(path: Path) -> None:
    with pytest.raises(ValueError, match="strict is 'maybe'; it is 'error', 'warn' or 'report'"):
        mcore_ckpt.load(path, {}, strict="maybe")  # type: ignore[arg-type]


def test_reporting_loads_the_rest_in_silence(path: Path) -> None:
    tensors = {
        "a": whole("model/a", torch.zeros(3, 4)),
        "c": whole("model/c", torch.full((2,), 7.0)),
    }
    report = mcore_ckpt.load(path, tensors, strict="report", prefixes=["model/"])
    assert (report.missing, report.unexpected) == (("model/c",), ("model/b",))
    assert torch.equal(tensors["a"].tensor, torch.arange(12.0).view(3, 4))
    assert (tensors["c"].tensor == 7).all()


def layers(path: Path, count: int, suffix: str = "w") -> dict[str, LayoutTensor]:
    names = [f"model/layers.{i}.{suffix}" for i in range(count)]
    return {name: whole(name, torch.full((2, 3), float(i))) for i, name in enumerate(names)}


def test_part_of_the_layers_by_pattern(tmp_path: Path) -> None:
    path = mcore_ckpt.save(tmp_path, step=1, tensors=layers(tmp_path, 6))
    held = {name: whole(name, torch.full((2, 3), 7.0)) for name in layers(tmp_path, 6)}
    report = mcore_ckpt.load(path, held, patterns=["model/layers.[1-2].*", "model/layers.5.w"])
    assert str(report) == ""
    found = [x.tensor[0, 0].item() for x in held.values()]
    assert found == [7, 1, 2, 7, 7, 5]
    del held["model/layers.2.w"]
    with pytest.raises(ValueError, match=r"1 unexpected: model/layers\.2\.w"):
        mcore_ckpt.load(path, held, patterns=["model/layers.[1-2].*"])


@pytest.mark.parametrize(("saved", "wanted", "what"), [(6, 4, "unexpected"), (4, 6, "missing")])
def test_more_or_fewer_layers_are_refused_by_name(
    tmp_path: Path, saved: int, wanted: int, what: str
) -> None:
    path = mcore_ckpt.save(tmp_path, step=1, tensors=layers(tmp_path, saved))
    with pytest.raises(ValueError, match=f"2 {what}: model/layers.4.w, model/layers.5.w$"):
        mcore_ckpt.load(path, layers(tmp_path, wanted))


def test_tensors_renamed_by_rule(tmp_path: Path) -> None:
    path = mcore_ckpt.save(tmp_path, step=1, tensors=layers(tmp_path, 3, "old.weight"))
    held = {name: whole(name, torch.zeros(2, 3)) for name in layers(tmp_path, 3, "new")}
    rules = [(r"model/layers\.(\d+)\.old\.weight", "model/layers.{1}.new")]
    assert str(mcore_ckpt.load(path, held, rename=rules)) == ""
    assert [x.tensor[0, 0].item() for x in held.values()] == [0, 1, 2]
    chunk = path / "model/layers.1.old.weight/c.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"!")
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"layers\.1\.old\.weight/c\.0\.0 is dam"):
        mcore_ckpt.load(path, held, rename=rules)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"prefixes": ["modle/", "w"]}, "no tensor begins with 'modle/' or 'w'; there is exp_avg/"),
        ({"patterns": ["modle/*", "model/a"]}, "no tensor is called 'modle/\\*'; there is exp_av"),
    ],
)
def test_a_selection_of_nothing(path: Path, names: dict[str, list[str]], message: str) -> None:
    """Else the tensors would keep their values without a word."""
    held = {"a": whole("model/a", torch.zeros(2, 3))}
    with pytest.raises(ValueError, match=message):
        mcore_ckpt.load(path, held, strict="report", **names)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("model/(", "x")], "rename 'model/\\(' is no regular expression"),
        ([("model/x", "y")], "'model/x' matches no tensor; there is exp_avg/a, model/a, model/b"),
        ([("model/[ab]", "model/c")], "model/a and model/b would both be called model/c"),
        ([("model/(a)", "model/{2}")], r"no group for what 'model/\{2\}' names"),
        ([("model/(a)", "model/{1.x}")], r"no group for what 'model/\{1.x\}' names"),
    ],
)
def test_rules_that_cannot_be(path: Path, rules: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mcore_ckpt.load(path, {}, rename=rules)


@pytest.mark.parametrize(("saved", "loaded"), [(8, 12), (12, 8), (8, 7)])
def test_another_padding_of_the_vocabulary(tmp_path: Path, saved: int, loaded: int) -> None:
    def padded(rows: int, fill: float) -> LayoutTensor:
        parts = [TensorLayout.whole("model/embedding.weight", (7, 2))]
        parts.append(TensorLayout.padding((rows - 7, 2)))
        value = torch.full((rows, 2), fill)
        value[:7] = torch.arange(14.0).view(7, 2) if fill == 0 else fill
        return LayoutTensor(value, TensorLayout.concat(parts))

    mcore_ckpt.save(tmp_path, step=1, tensors={"e": padded(saved, 0.0)})
    held = padded(loaded, 7.0)
    mcore_ckpt.load(tmp_path, {"e": held})
    assert torch.equal(held.tensor[:7], torch.arange(14.0).view(7, 2))
    assert (held.tensor[7:] == 0).all()


def test_prefixes(path: Path) -> None:
    tensors = {
        "a": whole("model/a", torch.zeros(3, 4)),
        "b": whole("model/b", torch.zeros(4, dtype=torch.int64)),
        "m": whole("exp_avg/a", torch.full((3, 4), 7.0)),
    }
    report = mcore_ckpt.load(path, tensors, prefixes=["model/"])
    assert (report.missing, report.unexpected) == ((), ())
    assert torch.equal(tensors["a"].tensor, torch.arange(12.0).view(3, 4))
    assert (tensors["m"].tensor == 7).all()
    del tensors["b"]
    with pytest.raises(ValueError, match="1 unexpected: model/b"):
        mcore_ckpt.load(path, tensors, prefixes=["model/"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_conversion_to_the_dtype_of_the_target(path: Path, dtype: torch.dtype) -> None:
    target = torch.zeros(3, 4, dtype=dtype)
    mcore_ckpt.load(path, {"a": whole("model/a", target)}, prefixes=["model/a"])
    assert torch.equal(target, torch.arange(12.0).view(3, 4).to(dtype))


def test_a_parameter_is_filled_in_place(path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    pointer = parameter.data_ptr()
    mcore_ckpt.load(path, {"a": whole("model/a", parameter)}, prefixes=["model/a"])
    assert parameter.data_ptr() == pointer
    assert parameter.requires_grad
    assert torch.equal(parameter.detach(), torch.arange(12.0).view(3, 4))


def test_padding_becomes_zero(path: Path) -> None:
    rows = TensorLayout.concat(
        [TensorLayout.whole("model/a", (3, 4)), TensorLayout.padding((2, 4))]
    )
    tensors = {
        "padded": LayoutTensor(torch.full((5, 4), float("nan")), rows),
        "only padding": LayoutTensor(torch.full((2,), float("nan")), TensorLayout.padding((2,))),
    }
    mcore_ckpt.load(path, tensors, prefixes=["model/a"])
    assert torch.equal(tensors["padded"].tensor[:3], torch.arange(12.0).view(3, 4))
    assert (tensors["padded"].tensor[3:] == 0).all()
    assert (tensors["only padding"].tensor == 0).all()


def test_a_target_that_cannot_be_filled_in_place(path: Path) -> None:
    target = LayoutTensor(torch.zeros(4, 3).T, TensorLayout.whole("model/a", (3, 4)))
    with pytest.raises(ValueError, match="a: cannot load into a tensor that is not contiguous"):
        mcore_ckpt.load(path, {"a": target}, prefixes=["model/a"])


def test_one_tensor_wanted_in_two_places(path: Path) -> None:
    """Tied copies, two chunks of one rank: each is filled."""
    tensors = {key: whole("model/a", torch.zeros(3, 4)) for key in ("first", "second")}
    mcore_ckpt.load(path, tensors, prefixes=["model/a"])
    for held in tensors.values():
        assert torch.equal(held.tensor, torch.arange(12.0).view(3, 4))


def test_a_scan_before_loading(path: Path) -> None:
    """Damage in what nobody asks for is found all the same, and nothing has been filled by then."""
    older = mcore_ckpt.save(path.parent, step=4, tensors={"a": whole("model/a", torch.zeros(3, 4))})
    chunk = path / "exp_avg" / "a" / "c.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")
    wanted = {"a": whole("model/a", torch.full((3, 4), 9.0))}
    assert mcore_ckpt.load(path, wanted, prefixes=["model/a"], scan="quick").step == 5
    wanted["a"].tensor.fill_(9.0)
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"exp_avg/a/c\.0\.0 is damaged"):
        mcore_ckpt.load(path, wanted, prefixes=["model/a"], scan="full")
    assert bool((wanted["a"].tensor == 9).all())
    with pytest.warns(RuntimeWarning, match="is damaged and passed over"):
        report = mcore_ckpt.load(path.parent, wanted, prefixes=["model/a"], scan="full")
    assert report.step == mcore_ckpt.open(older).step == 4
    assert bool((wanted["a"].tensor == 0).all())
    with pytest.raises(FileNotFoundError, match="no committed checkpoint"):
        mcore_ckpt.load(path.parent / "nowhere", wanted, scan="full")


def test_nothing_is_unpickled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """U49 and its kind: no unpickling of any sort at load, and no pickle on disk."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled something")

    for module, names in ((pickle, ("load", "loads", "Unpickler")), (torch, ("load",))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    real = np.load
    monkeypatch.setattr(np, "load", lambda *a, **k: refuse() if k.get("allow_pickle") else real(*a))
    tensors = {"a": whole("model/a", torch.zeros(3, 4))}
    mcore_ckpt.load(path, tensors, prefixes=["model/a"])
    assert torch.equal(tensors["a"].tensor, torch.arange(12.0).view(3, 4))
    assert mcore_ckpt.open(path).state["consumed"] == 40
    files = [os.path.join(root, name) for root, _, names in os.walk(path) for name in names]
    kinds = {os.path.basename(f).split(".")[0] for f in files}
    assert kinds == {"COMMIT", "manifest", "zarr", "c"}
    assert not any(Path(f).read_bytes().startswith(b"\x80\x04") for f in files)
