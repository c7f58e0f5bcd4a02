"""Training of decoders with many features at once, under every kind of layout."""

import dataclasses
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import comparable, compare, record, record_rank
from mcore_train.parity.metric import Record
from mcore_train.session import build_session

sys.path.append(str(Path(__file__).parent))
from toy import toy, write_tokens

STEPS = 2
GEMMA_LIKE: dict[str, Any] = {
    "tied_embeddings": True,
    "init_std": 0.1,
    "attention_bias": True,
    "attention": {
        "qk_norm": "head",
        "gate": True,
        "sinks": True,
        "softcap": 2.0,
        "scale": 0.4,
        "window": 3,
        "local_layers": [0, 2],
        "local_rope_base": 100.0,
        "nope_layers": [1],
        "output_bias": True,
    },
    "rope": {
        "rotary_dim": 4,
        "scaling": "longrope",
        "factor": 2.0,
        "original_length": 4,
        "short_factors": [1.0, 1.5],
        "long_factors": [2.0, 4.0],
    },
    "zero_centered_norm": True,
    "norm_place": "both",
    "activation": "quick_geglu",
    "glu_limit": 0.5,
    "glu_offset": 1.0,
    "embedding_scale": 3.0,
    "residual_scale": 0.7,
    "logit_scale": 0.5,
    "logit_softcap": 2.0,
    "pattern": ["*-", "*E", "*-", "*E"],
    "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_size": 16, "expert_bias": True},
}
OLMO_LIKE: dict[str, Any] = {
    "init_std": 0.1,
    "attention": {"qk_norm": "all", "window": 5, "sinks": True},
    "rope": {"interleaved": True, "scaling": "yarn", "factor": 2.0, "original_length": 4},
    "norm_place": "post",
    "activation": "squared_relu",
    "dropout": 0.1,
}
NEOX_LIKE: dict[str, Any] = {
    "init_std": 0.1,
    "norm": "layer_norm",
    "linear_bias": True,
    "attention": {"qk_norm": "head"},
    "residual": "parallel_shared",
    "activation": "gelu",
    "dropout": 0.1,
}
MODELS = {"gemma": GEMMA_LIKE, "olmo": OLMO_LIKE, "neox": NEOX_LIKE}
EVERY_KIND = "cp-kind=ring+all-gather+all-to-all+ring"
LAYOUTS = [
    ("gemma", 2, "tp=2,sp"),
    ("gemma", 4, "tp=4"),  # a key head lies on two ranks
    ("gemma", 4, f"cp=2,tp=2,sp,{EVERY_KIND}"),
    ("gemma", 2, "pp=2"),
    ("gemma", 2, "ep=2,lanes=2"),
    ("olmo", 4, "tp=4,sp"),
    ("olmo", 2, f"cp=2,{EVERY_KIND}"),
    ("olmo", 4, "tp=2,pp=2,schedule=interleaved,chunks=2"),
    ("olmo", 2, "dp=2,zero=3"),
    ("neox", 2, "tp=2,sp"),
]


def packed(model: str, folder: Path) -> TrainConfig:
    tokens = folder / "tokens"
    if not tokens.with_suffix(".bin").exists():
        write_tokens(tokens)
    return comparable(
        toy(
            model=MODELS[model],
            data={
                "mock": False,
                "train": str(tokens),
                "split": "8,2",
                "seq_length": 16,
                "eod_id": 0,
                "mask_eod_loss": True,
                "reset_positions": True,
                "reset_attention": True,
            },
            batch={"global_size": 2, "micro_size": 1},
            optimizer={"eps": 1e-3},
        )
    )


@cache
def alone(model: str, folder: Path) -> Record:
    single = record(packed(model, folder), ParallelMesh.single(), STEPS)
    assert single is not None
    return single


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.mark.parametrize(("model", "world", "layout"), LAYOUTS)
def test_layouts_equal_one_process(
    ranks: RankPool, folder: Path, model: str, world: int, layout: str
) -> None:
    """Loss, every gradient and the parameters after some steps, over packed documents."""
    config = packed(model, folder)
    parallel = ParallelConfig.parse(layout)
    recompute = RecomputeConfig()
    if "sp" in layout and model == "gemma":
        recompute = RecomputeConfig(mode="selective", parts=("core_attn", "norm"))
    tree = config_to_tree(dataclasses.replace(config, parallel=parallel, recompute=recompute))
    found = ranks.run(record_rank, world, tree, STEPS, timeout=200)[0]
    assert found is not None
    report = compare(alone(model, folder), found, layout=layout, world_size=world)
    assert report.holds, report.first_failure()


@pytest.mark.parametrize("layout", ["pp=2", "dp=2,zero=3", "tp=2,sp"])
def test_frozen_tensors_stay_as_they_are(ranks: RankPool, folder: Path, layout: str) -> None:
    """Also where a pipeline stage has nothing else; the others learn as in one process."""
    names = ("embedding.*", "layers.[01].*", "lm_head.*")
    config = dataclasses.replace(packed("neox", folder), freeze=names)
    single = record(config, ParallelMesh.single(), STEPS)
    parallel = ParallelConfig.parse(layout)
    tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
    found = ranks.run(record_rank, 2, tree, STEPS, timeout=200)[0]
    assert single is not None
    assert found is not None
    report = compare(single, found, layout=layout, world_size=2)
    assert report.holds, report.first_failure()
    assert all(name.startswith(("layers.2", "layers.3", "final_norm")) for name in single.gradients)
    initial = build_session(config, ParallelMesh.single())
    for name, parameter in initial.model.named_parameters():
        if not parameter.requires_grad and f"model/{name}" in found.parameters:
            assert torch.equal(found.parameters[f"model/{name}"], parameter), name
    initial.close()
    initial.buckets.close()


def test_a_config_survives_its_file() -> None:
    for model in MODELS.values():
        config = toy(model=model)
        assert config_from_tree(config_to_tree(config)) == config
