"""Training of BERT and of T5: over layouts, from files, and what a config of them refuses."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_data import IndexedWriter
from mcore_models import TokenBatch
from mcore_models.common.recompute import RecomputeConfig, RecomputeMode
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train.config import TrainConfig
from mcore_train.data import ReplicaData
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import Record, comparable, compare, record, record_rank
from mcore_train.session import build_session
from mcore_train.step import Step, evaluate

sys.path.append(str(Path(__file__).parent))
from toy import VOCABULARY, toy

STEPS = 2
MODELS: dict[str, dict[str, Any]] = {
    "bert": {
        "norm": "layer_norm",
        "norm_place": "sum",
        "activation": "gelu",
        "position": "learned",
        "max_positions": 12,
        "linear_bias": True,
        "tied_embeddings": True,
        "num_layers": 2,
        "num_kv_heads": 4,
        "attention": {"causal": False},
        "bert": {},
    },
    "t5": {
        "position": "none",
        "tied_embeddings": True,
        "activation": "relu",
        "num_layers": 2,
        "num_kv_heads": 4,
        "attention": {"scale": 1.0},
        "t5": {"num_buckets": 8, "max_distance": 10},
    },
}
DATA: dict[str, dict[str, Any]] = {
    "bert": {"masking": {"mask_id": 3, "cls_id": 1, "sep_id": 2}},
    "t5": {"spans": {"first_sentinel": 59, "num_sentinels": 8, "target_length": 9, "rate": 0.3}},
}
EXTRA = {"bert": {"pair_loss"}, "t5": set()}
_SINGLE: dict[str, Record] = {}

both = pytest.mark.parametrize("family", MODELS)


def run(family: str, **fields: Any) -> TrainConfig:
    """Two samples in a micro-batch, with dropout, of random texts unless `fields` name some."""
    tree: dict[str, Any] = {
        "model": {**MODELS[family], "dropout": 0.1},
        "data": {"mock": True, "seq_length": 12},
        "steps": STEPS,
    }
    return toy(**{**tree, **fields})


def sentences(prefix: Path) -> Path:
    """Twelve documents of 2 to 5 sentences of 2 to 6 tokens."""
    rng = np.random.default_rng(5)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(12):
            texts = [rng.integers(4, 50, rng.integers(2, 7)) for _ in range(rng.integers(2, 6))]
            writer.add_document(
                np.concatenate(texts).astype(np.uint16), [len(text) for text in texts]
            )
    return prefix


def from_files(family: str, prefix: Path, **fields: Any) -> TrainConfig:
    data = {"mock": False, "train": str(prefix), "split": "8,4", "seq_length": 12, **DATA[family]}
    return run(family, data=data, **fields)


@pytest.mark.parametrize(
    ("family", "layout", "recompute"),
    [
        ("bert", "tp=2,dp=2", "none"),
        ("bert", "tp=2,sp,pp=2", "full"),
        ("bert", "dp=2,zero=3", "selective"),
        ("t5", "tp=2,sp,pp=2", "full"),
        ("t5", "dp=2,zero=3", "none"),
    ],
)
def test_over_a_layout_as_in_one_process(
    ranks: RankPool, family: str, layout: str, recompute: RecomputeMode
) -> None:
    """Losses, every gradient and the parameters after two steps."""
    config = comparable(run(family))
    if family not in _SINGLE:
        single = record(config, ParallelMesh.single(), STEPS)
        assert single is not None
        assert {*single.auxiliary[0]} == EXTRA[family]
        _SINGLE[family] = single
    parallel = ParallelConfig.parse(layout)
    again = RecomputeConfig(mode=recompute)
    tree = config_to_tree(dataclasses.replace(config, parallel=parallel, recompute=again))
    size = parallel.model_size * (parallel.dp or 1)
    found = ranks.run(record_rank, size, tree, STEPS, timeout=200)[0]
    report = compare(_SINGLE[family], found, layout=layout, world_size=size)
    assert report.holds, report.first_failure()
    names = {d.name for d in report.differences if d.kind == "gradient"}
    assert names == set(_SINGLE[family].gradients)


@both
def test_a_step_from_files_and_its_validation(tmp_path: Path, family: str) -> None:
    config = from_files(family, sentences(tmp_path / "text"))
    assert config_from_tree(config_to_tree(config)) == config
    session = build_session(config, ParallelMesh.single())
    step, batches = Step(session), session.data.batches()
    first = next(batches)
    before = evaluate(session)
    losses = [step(first, lr=1e-2, rng=session.rng.next("dropout")) for _ in range(8)]
    assert losses[-1].loss < losses[0].loss - 0.3
    assert losses[0].loss == pytest.approx(float(np.log(VOCABULARY)), abs=0.7)
    assert {*losses[0].extra} >= EXTRA[family]
    assert evaluate(session) != before


def test_pairs_of_segments_are_labelled(tmp_path: Path) -> None:
    """One label for each text, none for its padding, and as many counted as the batch has."""
    config = from_files("bert", sentences(tmp_path / "text"))
    (batch, *_) = next(ReplicaData(config, ParallelMesh.single()).batches())
    assert isinstance(batch, TokenBatch)
    assert batch.document_labels is not None
    starts = batch.cu_seqlens[:-1] % 12 == 0
    assert int(starts.sum()) == 2
    assert (batch.document_labels[starts] >= 0).all()
    assert (batch.document_labels[~starts] == -1).all()
    assert (batch.tokens.view(2, 12)[:, 0] == 1).all()
    assert batch.token_types is not None
    assert batch.token_types.any()


def test_what_t5_reads_and_writes(tmp_path: Path) -> None:
    """Every text has its source: what was left out of the one is in the other."""
    config = from_files("t5", sentences(tmp_path / "text"))
    (batch, *_) = next(ReplicaData(config, ParallelMesh.single()).batches())
    source = batch.source
    assert source is not None
    assert source.num_documents == batch.num_documents == 4
    for sample in (0, 2):
        read = source.tokens[source.cu_seqlens[sample] : source.cu_seqlens[sample + 1]].tolist()
        bounds = slice(int(batch.cu_seqlens[sample]), int(batch.cu_seqlens[sample + 1]))
        written = batch.tokens[bounds].tolist()
        assert batch.labels is not None
        assert batch.labels[bounds].tolist() == [*written[1:], 1]
        assert written[0] == 0
        assert read[-1] == 1
        marks = [token for token in read if token > 51]
        assert marks == [token for token in written if token > 51]
        assert marks[0] == 59


def on_both_ranks(tree: dict[str, Any]) -> list[TokenBatch]:
    config = config_from_tree(tree)
    mesh = ParallelMesh.create(config.parallel)
    assert mesh is not None
    return next(ReplicaData(config, mesh).batches())


@both
def test_ranks_of_a_replica_receive_what_its_first_reads(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    config = from_files(family, sentences(tmp_path / "text"), parallel={"tp": 2})
    alone = dataclasses.replace(config, parallel=ParallelConfig())
    wanted = next(ReplicaData(alone, ParallelMesh.single()).batches())
    for found in ranks.run(on_both_ranks, 2, config_to_tree(config)):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)


def assert_same(one: TokenBatch, other: TokenBatch) -> None:
    for field in dataclasses.fields(TokenBatch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b), field.name
        elif isinstance(b, TokenBatch):
            assert_same(a, b)
        else:
            assert a == b, field.name


@pytest.mark.parametrize(
    ("family", "data", "message"),
    [
        ("bert", {"train": "x"}, r"a bert learns to restore .*: give data\.masking"),
        ("t5", {"train": "x"}, r"a t5 learns to restore .*: give data\.spans"),
        ("bert", {"mock": True, **DATA["t5"]}, r"data\.spans is for models of the family t5"),
        ("t5", {"spans": {"first_sentinel": 5}}, r"first_sentinel=5 and 100 ids.*use 99 or more"),
    ],
)
def test_what_a_config_refuses(family: str, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(family, data={"mock": False, "seq_length": 12, **data})


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        ("t5", {"pp": 6}, "num_layers=4 of both stacks is fewer than pp=6: use pp 4 or less"),
        ("t5", {"cp": 3}, r"cp=3: 4 heads with a bias .* over 3 ranks: use 2 or 4"),
        ("bert", {"cp": 3, "context_kind": "all-to-all"}, "4 query and 4 kv heads cannot .* 3"),
    ],
)
def test_layouts_that_are_refused(family: str, parallel: dict[str, Any], message: str) -> None:
    config = run(family, parallel=parallel)
    size = config.parallel.model_size
    mesh = ParallelMesh.arithmetic(config.parallel, world_size=size, rank=0)
    with pytest.raises(ValueError, match=message):
        build_session(config, mesh)


def test_a_text_to_write_that_ranks_cannot_share() -> None:
    data = {"mock": False, "train": "x", "seq_length": 12, **DATA["t5"]}
    with pytest.raises(ValueError, match=r"length 9 cannot be cut .*nearest valid lengths: 8 and"):
        run("t5", data=data, parallel={"cp": 2})
