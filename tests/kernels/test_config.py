"""`KernelConfig`: names are checked where they are given."""

import dataclasses

import pytest

from mcore_kernels import OPERATORS, KernelConfig


def test_there_is_a_field_per_operator() -> None:
    assert [field.name for field in dataclasses.fields(KernelConfig)] == list(OPERATORS)


def test_every_default_is_auto() -> None:
    assert set(dataclasses.asdict(KernelConfig()).values()) == {"auto"}
    assert KernelConfig().choice("linear") is None
    assert KernelConfig(linear="reference").choice("linear") == "reference"


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(
        ValueError, match="swiglu: no implementation 'tritn'; did you mean 'triton'"
    ):
        KernelConfig(swiglu="tritn")


def test_a_name_that_cannot_run_here_is_still_a_valid_name() -> None:
    assert KernelConfig(swiglu="triton").swiglu == "triton"


def test_it_is_frozen_and_named() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KernelConfig().linear = "reference"  # type: ignore[misc]
    with pytest.raises(TypeError):
        KernelConfig("reference")  # type: ignore[misc]
