"""Training and checkpoints of a model with recurrent layers, under every kind of layout."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_ckpt
from mcore_models import GPT, ModelConfig, build_model
from mcore_parallel import LayoutTensor, ParallelConfig, ParallelMesh, RngKey
from mcore_parallel.layout import gather_all
from mcore_parallel.testing import RankPool
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import comparable, compare, record, record_rank
from mcore_train.session import build_session
from mcore_train.step import Step

sys.path.append(str(Path(__file__).parent))
from toy import toy

STEPS = 3
HYBRID: dict[str, Any] = {
    "num_layers": 3,
    "pattern": ["G-", "*-", "M."],
    "mamba": {"num_heads": 8, "head_dim": 4, "state_size": 6, "num_groups": 2, "chunk_size": 4},
    "delta_net": {
        **{"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 8},
        "chunk_size": 4,
    },
}


def hybrid(**fields: Any) -> TrainConfig:
    return toy(**{"model": HYBRID, **fields})


def test_groups_on_several_ranks_each_equal_one_process(ranks: RankPool) -> None:
    """Loss, every gradient and the parameters after three steps, with dropout.

    With tp=4 each of the two groups of B and C, and of the key heads, lies on two ranks.
    """
    parallel = ParallelConfig(tp=4)
    config = comparable(hybrid(model={**HYBRID, "dropout": 0.1}))
    single = record(config, ParallelMesh.single(), STEPS)
    assert single is not None
    tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
    found = ranks.run(record_rank, 4, tree, STEPS, timeout=200)[0]
    report = compare(single, found, layout="tp=4", world_size=4)
    assert report.holds, report.first_failure()
    names = {d.name for d in report.differences if d.kind == "gradient"}
    assert names == set(single.gradients)
    own = {name for name in names if name.startswith("layers.2.mamba.")}
    assert len(own) == 5 + 6 + 3 + 2  # projections, convolutions, numbers of heads, norm and out
    own = {name for name in names if name.startswith("layers.0.delta_net.")}
    assert len(own) == 6 + 3 + 2 + 2


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    config = hybrid()
    assert config_from_tree(config_to_tree(config)) == config
    with pytest.raises(ValueError, match="num_groups=3"):
        hybrid(model={**HYBRID, "mamba": {"num_heads": 8, "num_groups": 3}})


def test_numbers_of_heads_are_trained_in_fp32_in_a_16_bit_model() -> None:
    """They are their own masters: an update far below their 16-bit spacing is not lost."""
    config = hybrid(precision="bf16", optimizer={"eps": 1e-12})
    session = build_session(config, ParallelMesh.single())
    step, batches = Step(session), session.data.batches()
    own = [f"layers.2.mamba.{name}" for name in ("a_log", "d", "dt_bias")]
    own += [f"layers.0.delta_net.{name}" for name in ("a_log", "dt_bias")]
    before = {name: session.model.get_parameter(name).detach().clone() for name in own}
    step(next(batches), lr=1e-5, rng=session.rng.next("dropout"))
    for name in own:
        after = session.model.get_parameter(name).detach()
        assert after.dtype == torch.float32
        change = (after - before[name]).abs()
        assert 0 < change.max() < 1e-4, name
        assert torch.equal(after.bfloat16(), before[name].bfloat16()), name
    assert session.model.get_parameter("layers.2.mamba.norm.weight").dtype == torch.bfloat16
    session.close()
    session.buckets.close()


# --- checkpoints --------------------------------------------------------------------------------


def stored(model: GPT) -> dict[str, LayoutTensor]:
    specs = model.specs()
    return {
        name: LayoutTensor(p.data, specs[name].layout.renamed(lambda name: f"model/{name}"))
        for name, p in model.named_parameters()
    }


def make_mesh(tp: int) -> ParallelMesh:
    mesh = ParallelMesh.single() if tp == 1 else ParallelMesh.create(ParallelConfig(tp=tp))
    assert mesh is not None
    return mesh


def save_over(config: ModelConfig, tp: int, directory: Path) -> None:
    mesh = make_mesh(tp)
    model = build_model(config, mesh, key=RngKey(7))
    mcore_ckpt.save(directory, step=1, tensors=stored(model), state={}, group=mesh.world)
    mesh.close()


def load_over(config: ModelConfig, tp: int, directory: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of what the checkpoint holds, and (on rank 0) its whole tensors."""
    mesh = make_mesh(tp)
    model = build_model(config, mesh, key=None)
    tensors = stored(model)
    mcore_ckpt.load(directory, tensors, mesh.world)
    with torch.no_grad():
        logits: Tensor = model.eval()(torch.arange(26).reshape(2, 13))
    whole = gather_all(tensors, mesh.world)
    mesh.close()
    return logits, {name: value.clone() for name, value in whole.items()}


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (1, 4), (2, 1), (4, 1)])
def test_a_checkpoint_goes_from_any_cut_to_any(
    ranks: RankPool, tmp_path: Path, saved: int, loaded: int
) -> None:
    """U42: fused projection, convolution, norm, a_log, d and dt_bias; whole tensors bitwise.

    With four ranks the groups of B and C, and the key heads, lie on two of them each.
    """
    config = hybrid().model
    want = build_model(config, key=RngKey(7))
    wanted = {
        fragment.name: view for tensor in stored(want).values() for fragment, view in tensor.views()
    }
    with torch.no_grad():
        expected: Tensor = want.eval()(torch.arange(26).reshape(2, 13))
    if saved == 1:
        save_over(config, 1, tmp_path)
        results = ranks.run(load_over, loaded, config, loaded, tmp_path)
    else:
        ranks.run(save_over, saved, config, saved, tmp_path)
        results = [load_over(config, 1, tmp_path)]
    found = results[0][1]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    for logits, _ in results:
        if loaded == 1:
            assert torch.equal(logits, expected)
        else:
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
