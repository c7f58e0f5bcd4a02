"""Targets and the requirements that read them."""

import importlib.metadata
import importlib.util

import pytest
import torch

from mcore_kernels import Target
from mcore_kernels.requirements import (
    needs_arch,
    needs_device,
    needs_dtype,
    needs_head_dim,
    needs_package,
)


def test_describe() -> None:
    assert Target().describe() == "cpu float32"
    target = Target(device_type="cuda", arch=(9, 0), dtype=torch.bfloat16, head_dim=128)
    assert target.describe() == "cuda sm_90 bfloat16 head_dim=128"
    assert Target(interpret=True).describe() == "cpu float32 interpreted"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.int8}, "must be floating-point, such as torch.bfloat16; got torch.int8"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
    ],
)
def test_values_that_make_no_sense(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Target(**arguments)


def test_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Target.of("cpu", head_dim=64) == Target(head_dim=64)
    assert Target.of(torch.device("meta")).device_type == "meta"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device here for the target 'cuda:1'"):
        Target.of("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, device.index))
    assert Target.of("cuda:6").arch == (8, 6)


def test_device() -> None:
    check = needs_device("cuda", "xpu")
    assert check(Target(device_type="xpu")) is None
    assert check(Target()) == "needs cuda or xpu, the target is cpu"


def test_arch() -> None:
    check = needs_arch((9, 0))
    assert check(Target()) is None
    assert check(Target(device_type="cuda", arch=(10, 0))) is None
    assert check(Target(device_type="cuda", arch=(8, 9))) == (
        "needs compute capability 9.0 or newer, the target has 8.9"
    )
    assert check(Target(device_type="cuda")) == (
        "needs compute capability 9.0 or newer, the target's is unknown"
    )


def test_dtype() -> None:
    check = needs_dtype(torch.bfloat16, torch.float16)
    assert check(Target(dtype=torch.float16)) is None
    assert check(Target()) == "needs bfloat16 or float16, the target is float32"


def test_head_dim() -> None:
    check = needs_head_dim(maximum=256, multiple=8)
    assert check(Target()) is None
    assert check(Target(head_dim=72)) is None
    for size in (264, 12):
        assert check(Target(head_dim=size)) == (
            f"needs a head size of at most 256 and a multiple of 8, the target has {size}"
        )


def test_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert needs_package("torch", "2.0")(Target()) is None
    assert needs_package("no_such_package", "1.2")(Target()) == (
        "no_such_package is not installed (needs no_such_package>=1.2)"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for version, fits in (("3.9.1", False), ("3.10.0+git1", True), ("3.10", True), ("4.0", True)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, v=version: v)
        reason = needs_package("thing", "3.10")(Target())
        assert (reason is None) == fits
        assert fits or reason == f"thing {version} is installed, needs thing>=3.10"
