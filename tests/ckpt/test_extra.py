"""Extra state of modules: tensors resharded or replicated, values as JSON, misfits by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.extra import ExtraState, collect_extra, restore_extra
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.testing import RankPool


class Quantiser:
    """Scales for blocks of rows, cut as its weight is; a history that every rank has alike."""

    def __init__(self, rank: int, size: int, fill: float) -> None:
        rows = 12 // size
        self.scales = torch.zeros(rows)
        self.history = torch.full((3,), fill)
        self.steps = int(fill)
        if fill:
            self.scales += torch.arange(12.0)[rows * rank : rows * rank + rows] + fill
        self.layouts = {
            "scales": TensorLayout.whole("scales", (12,)).slice(0, rows * rank, rows * rank + rows),
            "history": TensorLayout.whole("history", (3,)).replicated(rank, size),
        }

    def extra_state(self) -> ExtraState:
        held = {"scales": self.scales, "history": self.history}
        return ExtraState(
            tensors={key: LayoutTensor(held[key], layout) for key, layout in self.layouts.items()},
            values={"steps": self.steps, "format": "e4m3"},
        )

    def load_extra_values(self, values: Mapping[str, Any]) -> None:
        assert values["format"] == "e4m3"
        self.steps = values["steps"]


NAMES = ("layers.0.mlp", "layers.1.mlp")


def save_extra(folder: Path) -> None:
    group = Group.world()
    modules = {n: Quantiser(group.rank, group.size, float(i + 1)) for i, n in enumerate(NAMES)}
    tensors, values = collect_extra(modules)
    mcore_ckpt.save(folder, step=1, tensors=tensors, state={"extra": values}, group=group)


def load_extra(folder: Path) -> None:
    group = Group.world()
    modules = {name: Quantiser(group.rank, group.size, 0.0) for name in NAMES}
    tensors, _ = collect_extra(modules)
    mcore_ckpt.load(folder, tensors, group)
    assert restore_extra(modules, mcore_ckpt.read_state(folder)["extra"]) == ()
    for i, name in enumerate(NAMES):
        expected = Quantiser(group.rank, group.size, float(i + 1))
        assert torch.equal(modules[name].scales, expected.scales)
        assert torch.equal(modules[name].history, expected.history)
        assert modules[name].steps == i + 1


@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (4, 1), (2, 4)])
def test_extra_state_goes_to_other_layouts(
    ranks: RankPool, tmp_path: Path, saved: int, loaded: int
) -> None:
    ranks.run(save_extra, saved, tmp_path)
    assert sorted(mcore_ckpt.open(tmp_path)) == [
        f"extra/{module}/{name}" for module in NAMES for name in ("history", "scales")
    ]
    ranks.run(load_extra, loaded, tmp_path)


def test_modules_that_do_not_fit_are_named() -> None:
    modules = {"a": Quantiser(0, 1, 3.0), "b": Quantiser(0, 1, 4.0)}
    saved = {"a": {"steps": 9, "format": "e4m3"}, "c": {"steps": 1, "format": "e4m3"}}
    message = "extra state does not fit: b has no saved state; the saved state of c has no module"
    with pytest.raises(ValueError, match=message):
        restore_extra(modules, saved)
    assert modules["a"].steps == 3
    assert len(restore_extra(modules, saved, strict=False)) == 2
    assert (modules["a"].steps, modules["b"].steps) == (9, 4)


def test_a_module_whose_name_cannot_be_stored() -> None:
    with pytest.raises(ValueError, match="module name 'a b'"):
        collect_extra({"a b": Quantiser(0, 1, 1.0)})
