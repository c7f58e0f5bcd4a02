"""Latent attention and multi-token prediction under every kind of layout equal one process."""

import dataclasses
from pathlib import Path

import pytest
import torch

from mcore_models import ModelConfig
from mcore_models.common.recompute import RecomputeConfig
from mcore_models.parts import LatentAttentionConfig, MoEConfig, MTPConfig
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import LEAST_MARGIN, Record, comparable, compare, record, record_rank
from mcore_train.parity.families import family_config, write_documents
from mcore_train.session import build_session
from mcore_train.step import Step

STEPS = 2
_SHARED = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=3,
    num_heads=8,
    ffn_size=48,
    dropout=0.1,
    init_std=0.1,
)
MODELS = {
    # Experts in the layers that predict further tokens: their losses and loads count too.
    "latent": dataclasses.replace(
        _SHARED,
        num_heads=0,
        pattern=("+-", "+E", "+E"),
        latent=LatentAttentionConfig(
            num_heads=8, kv_rank=12, q_rank=20, head_dim=4, rope_dim=2, value_dim=6
        ),
        moe=MoEConfig(
            num_experts=4,
            top_k=2,
            expert_ffn_size=24,
            shared_ffn_size=16,
            score_function="sigmoid",
            correction_rate=1e-3,
            aux_loss_coefficient=0.05,
        ),
        mtp=MTPConfig(num_depths=2, loss_weight=0.8),
    ),
    "tied": dataclasses.replace(
        _SHARED,
        num_kv_heads=2,
        tied_embeddings=True,
        norm="layer_norm",
        linear_bias=True,
        mtp=MTPConfig(num_depths=1, loss_weight=0.8),
    ),
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("packed") / "documents", "gpt")


def config_of(name: str, documents: Path) -> TrainConfig:
    """Short documents, packed, that attend to themselves only."""
    config = family_config("gpt", tokens=documents)
    return dataclasses.replace(config, model=MODELS[name], seed=2)


@pytest.fixture(scope="module")
def references(documents: Path) -> dict[str, Record]:
    found = {}
    for name in MODELS:
        one = record(comparable(config_of(name, documents)), ParallelMesh.single(), STEPS)
        assert one is not None
        assert one.margin > LEAST_MARGIN, f"{name}: a router's choice is rounding"
        found[name] = one
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("latent", "tp=2,sp,ep=2,etp=1"),
        ("latent", "tp=2,zero=3"),
        ("latent", "cp=2,cp-kind=ring"),
        ("latent", "cp=2,cp-kind=all-to-all,pp=2,schedule=zb-h1"),
        ("latent", "cp=2,cp-kind=all-gather,tp=2,sp"),
        ("tied", "tp=2,cp=2,pp=2"),
        ("tied", "pp=2,schedule=zb-v,chunks=2,count-embedding"),
    ],
)
def test_a_layout_equals_one_process(
    ranks: RankPool, references: dict[str, Record], documents: Path, model: str, layout: str
) -> None:
    """U30: the gradients of what predicts further tokens do not depend on cp, nor on anything."""
    parallel = ParallelConfig.parse(layout)
    config = dataclasses.replace(comparable(config_of(model, documents)), parallel=parallel)
    if "sp" in layout:
        again = RecomputeConfig(mode="full")
        if parallel.cp > 1:
            again = RecomputeConfig(mode="selective", parts=("latent_up", "norm"))
        config = dataclasses.replace(config, recompute=again)
    world = parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1)
    found = ranks.run(record_rank, world, config_to_tree(config), STEPS, timeout=200)[0]
    report = compare(references[model], found, layout=layout, world_size=world)
    assert report.holds, report.first_failure()
    names = {d.name for d in report.differences if d.kind == "gradient"}
    assert names == set(references[model].gradients)
    assert {"mtp.0.project.weight", "mtp.0.final_norm.weight"} <= names


def test_losses_are_reported_for_each_depth(documents: Path) -> None:
    session = build_session(config_of("latent", documents), ParallelMesh.single())
    step, batches = Step(session), session.data.batches()
    metrics = step(next(batches), lr=1e-3, rng=session.rng.next("dropout"))
    losses = [metrics.extra[f"mtp_loss_{depth}"] for depth in range(2)]
    # Short documents: there are fewer tokens to predict at every depth, of the same difficulty.
    assert 0 < losses[1] < losses[0] < metrics.loss
    assert "moe_imbalance_4" in metrics.extra  # the layer of depth 1
    session.close()
    session.buckets.close()


def test_a_config_survives_its_file(documents: Path) -> None:
    config = config_of("latent", documents)
    assert config_from_tree(config_to_tree(config)) == config
    assert torch.tensor(config.model.layers_with("E")).tolist() == [1, 2, 3, 4]
