"""The metric of `parity`, what it finds, and the command; the matrix of layouts is in parity/."""

import dataclasses
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train.cli import main
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import (
    Difference,
    Record,
    Report,
    comparable,
    compare,
    parity,
    record,
    record_rank,
    world_size,
)
from mcore_train.step import Step

sys.path.append(str(Path(__file__).parent))
from toy import GPT2_DRESS, toy, toy_tree

STEPS = 3
DRESSES: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": GPT2_DRESS}


Reference = tuple[TrainConfig, Record]


@pytest.fixture(scope="module")
def reference() -> Callable[..., Reference]:
    """The config of a dress, and its run in one process; each is made once."""

    @cache
    def of(dress: str, global_size: int = 4, steps: int = STEPS) -> Reference:
        config = comparable(
            toy(
                model={**DRESSES[dress], "dropout": 0.1},
                batch={"global_size": global_size},
                steps=STEPS,
            )
        )
        found = record(config, ParallelMesh.single(), steps)
        assert found is not None
        return config, found

    return of


def test_three_replicas(ranks: RankPool, reference: Callable[..., Reference]) -> None:
    """Many small buckets in uneven shares, no overlap."""
    config, _ = reference("gpt2")
    parallel = ParallelConfig(dp=3, bucket_size=700, overlap=False)
    batch = dataclasses.replace(config.batch, global_size=6, micro_size=1)
    config = dataclasses.replace(config, batch=batch)
    single = record(config, ParallelMesh.single(), STEPS)
    assert single is not None
    tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
    found = ranks.run(record_rank, 3, tree, STEPS, timeout=120)[0]
    report = compare(single, found, layout="dp=3", world_size=3)
    assert report.holds, report.first_failure()


def test_the_metric_finds_a_small_error(reference: Callable[..., Reference]) -> None:
    _, right = reference("llama")
    name = "layers.2.mlp.up.weight"
    off = right.gradients[name].clone()
    off[3, 5] += 3e-5 * torch.linalg.vector_norm(off)
    wrong = dataclasses.replace(right, gradients={**right.gradients, name: off})
    report = compare(right, wrong, layout="x", world_size=1)
    assert not report.holds
    failure = report.first_failure()
    assert failure is not None
    assert (failure.kind, failure.name) == ("gradient", name)
    assert failure.ratio == pytest.approx(3e-5, rel=1e-2)


def test_nan_and_missing_names_are_differences() -> None:
    one = Record(losses=(1.0,), gradients={"a": torch.ones(2)}, parameters={"a": torch.ones(2)})
    nan = dataclasses.replace(one, parameters={"a": torch.tensor([1.0, float("nan")])})
    assert not compare(one, nan, layout="x", world_size=1).holds
    with pytest.raises(ValueError, match="different names"):
        compare(
            one, dataclasses.replace(one, gradients={"b": torch.ones(2)}), layout="x", world_size=1
        )
    assert Report(
        layout="x", world_size=1, differences=(Difference(kind="loss", name="0", ratio=0.0),)
    ).holds


def test_a_loss_of_zero_is_compared() -> None:
    """Where every token is masked, the loss is 0 in any layout."""
    nothing = Record(losses=(0.0,), gradients={}, parameters={}, diverged=())
    assert compare(nothing, nothing, layout="x", world_size=1).holds
    wrong = dataclasses.replace(nothing, losses=(1e-3,))
    assert not compare(nothing, wrong, layout="x", world_size=1).holds


def test_the_fewest_ranks_of_a_layout() -> None:
    for text, fewest in [("tp=2", 2), ("ep=4,tp=2", 8), ("replicas=2", 2), ("ep=2,replicas=2", 4)]:
        layout = ParallelConfig.parse(text)
        assert world_size(layout) == fewest
        layout.resolve(fewest)


@pytest.mark.parametrize("text", ["zero=3", "tp=2,zero=2", "pp=2,zero=3"])
def test_a_level_without_ranks_to_share_proves_nothing(text: str) -> None:
    with pytest.raises(ValueError, match=r"over one rank shares nothing: give dp=2 or more"):
        next(iter(parity(toy(), [ParallelConfig.parse(text)])))


def test_seeds_matter(reference: Callable[..., Reference]) -> None:
    """The comparison would see another initialisation."""
    other = comparable(config_from_tree(toy_tree(seed=5, steps=STEPS, model={"dropout": 0.1})))
    found = record(other, ParallelMesh.single(), STEPS)
    assert found is not None
    assert not compare(reference("llama")[1], found, layout="x", world_size=1).holds


def faulty_rank(tree: dict[str, Any], name: str) -> Record | None:
    """`record_rank` where rank 1 damages its copy of a parameter after its one update."""
    original = Step.update

    def update(self: Step, lr: float) -> float:
        norm = original(self, lr)
        self.session.optimizer.wait()
        if self.session.mesh.rank == 1:
            with torch.no_grad():
                self.session.model.get_parameter(name).view(-1)[3] += 1e-6
        return norm

    with mock.patch.object(Step, "update", update):
        return record_rank(tree, 1)


@pytest.mark.parametrize(
    ("dress", "layout", "name"),
    [
        ("llama", "dp=2", "layers.1.mlp.down.weight"),
        ("llama", "tp=2", "final_norm.weight"),
        ("gpt2", "pp=2", "embedding.weight"),
    ],
)
def test_copies_that_differ_are_found(
    ranks: RankPool, reference: Callable[..., Reference], dress: str, layout: str, name: str
) -> None:
    """Loss, gradient and optimizer state are right: only a rank's own weights are not."""
    config, single = reference(dress, steps=1)
    tree = config_to_tree(dataclasses.replace(config, parallel=ParallelConfig.parse(layout)))
    found = ranks.run(faulty_rank, 2, tree, name, timeout=120)[0]
    report = compare(single, found, layout=layout, world_size=2)
    wrong = [(d.kind, d.name) for d in report.differences if not d.holds]
    assert wrong == [("copy", name)]


def test_the_command_names_the_first_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One layout that is wrong fails the command; the others are still compared."""
    name = "layers.1.mlp.down.weight"

    def launch(
        fn: object, size: int, tree: dict[str, Any], steps: int, **options: object
    ) -> list[Record | None]:
        config = dataclasses.replace(config_from_tree(tree), parallel=ParallelConfig())
        found = record(config, ParallelMesh.single(), steps)
        assert found is not None
        if size == 2:
            gradients = {**found.gradients, name: 1.001 * found.gradients[name]}
            found = dataclasses.replace(found, gradients=gradients)
        return [found, *[None] * (size - 1)]

    monkeypatch.setattr("mcore_train.parity.run.launch_local", launch)
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(toy_tree(steps=2)))
    command = ["parity", "--config", str(file), "--train-steps", "1"]
    assert main([*command, "--layout", "pp=2", "--layout", "tp=2,pp=2"]) == 1
    wrong, right = capsys.readouterr().out.splitlines()
    assert f" on 2: DIFFERS, first in gradient {name} by 1.0e-03 (largest: loss 0.0e+00" in wrong
    assert "gradient 1.0e-03" in wrong
    assert "parameter 0.0e+00" in wrong
    assert " on 4: equal (largest: loss 0.0e+00" in right
    assert main([*command, "--layout", "tp=2,pp=2"]) == 0


def test_files_and_checkpoints_are_left_alone(tmp_path: Path) -> None:
    """Whatever the config says about saving: nothing of it is done."""
    saving = {"directory": str(tmp_path / "c"), "interval": 1, "keep_last": 2}
    config = comparable(toy(checkpoint=saving, log={"directory": str(tmp_path / "log")}))
    assert record(config, ParallelMesh.single(), 1) is not None
    assert list(tmp_path.iterdir()) == []
