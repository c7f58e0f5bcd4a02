"""Dispatchers by name: those here, those that packages register, and those that refuse."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_parallel import Group, ParallelConfig
from mcore_parallel.expert import (
    DISPATCHERS,
    AllGather,
    AllToAll,
    check_dispatcher,
    dispatcher_factory,
    make_dispatcher,
)
from mcore_parallel.expert.local import Local

ALONE: dict[str, Any] = {"ep": Group.single(), "etp": Group.single()}
MODULE = """
def make(num_experts, /, *, ep, etp, permute, overlap):
    if overlap:
        raise ValueError("quick: needs overlap=0, and it is on")
    return "quick", num_experts
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that registers three dispatchers, of which two cannot be imported."""
    info = tmp_path / "quick_dispatch-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quick-dispatch\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mcore_parallel.dispatchers]\nquick = quick_dispatch:make\nlost = quick_lost:make\n"
        "old = quick_dispatch:gone\n"
    )
    (tmp_path / "quick_dispatch.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "quick_dispatch", raising=False)


def test_those_of_this_package() -> None:
    assert DISPATCHERS == ("all-to-all", "all-gather")
    assert isinstance(make_dispatcher("all-to-all", 4, **ALONE), AllToAll)
    assert isinstance(make_dispatcher("all-gather", 4, **ALONE), AllGather)
    for name in DISPATCHERS:
        assert isinstance(make_dispatcher(name, 4, drops=False, **ALONE), Local)
    assert not make_dispatcher("all-gather", 4, overlap=False, **ALONE).overlap  # type: ignore[attr-defined]


def test_layouts_name_them() -> None:
    config = ParallelConfig.parse("dp=4,ep=2,dispatch=all-gather")
    assert config.dispatcher == "all-gather"
    assert "dispatch=all-gather" in config.describe()
    assert ParallelConfig.parse(config.describe()) == config
    assert ParallelConfig().dispatcher == "all-to-all"
    assert "dispatch" not in ParallelConfig().describe()


@pytest.mark.usefixtures("installed")
def test_those_of_other_packages() -> None:
    config = ParallelConfig.parse("dp=2,ep=2,dispatch=quick")
    for drops in (True, False):
        options = {"overlap": False, "drops": drops, **ALONE}
        assert make_dispatcher(config.dispatcher, 6, **options) == ("quick", 6)
    with pytest.raises(ValueError, match="quick: needs overlap=0, and it is on"):
        make_dispatcher("quick", 6, **ALONE)
    check_dispatcher("lost")
    with pytest.raises(ValueError, match=r"'lost' is registered as quick_lost:make, which cannot"):
        dispatcher_factory("lost")
    with pytest.raises(ValueError, match=r"'old' is registered as quick_dispatch:gone, which cann"):
        dispatcher_factory("old")
    with pytest.raises(
        ValueError, match=r"'slow': there are all-to-all, all-gather, lost, old, quick;"
    ):
        check_dispatcher("slow")


def test_an_unknown_one_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match=r"no dispatcher 'quick': there are all-to-all, all-gath"):
        ParallelConfig.parse("dp=2,ep=2,dispatch=quick")
