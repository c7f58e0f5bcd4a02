"""The loss rule: sums over all valid tokens, divided by their number, however the batch is cut."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_models import GlobalCounts
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey
from mcore_parallel.testing import RankPool
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import Record, comparable, compare, record, record_rank
from mcore_train.session import build_session
from mcore_train.step import Step, evaluate

sys.path.append(str(Path(__file__).parent))
from toy import toy, write_tokens


def uneven(prefix: Path, micro: int, **fields: Any) -> Any:
    """Documents of 1 to 12 tokens with EOD masked: every micro-batch has other valid tokens."""
    data = {
        "mock": False,
        "train": str(prefix),
        "split": "8,2",
        "seq_length": 8,
        "eod_id": 0,
        "mask_eod_loss": True,
        "reset_positions": True,
        "reset_attention": True,
    }
    batch = {"global_size": 4, "micro_size": micro}
    return comparable(toy(data=data, batch=batch, steps=2, **fields))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens") / "toy")


@pytest.fixture(scope="module")
def reference(prefix: Path) -> Record:
    found = record(uneven(prefix, 4), ParallelMesh.single(), 2)
    assert found is not None
    return found


@pytest.mark.parametrize("micro", [1, 2])
def test_micro_batches_do_not_matter(prefix: Path, reference: Record, micro: int) -> None:
    """U26: loss and gradient are those of the whole batch, not a mean of means."""
    found = record(uneven(prefix, micro), ParallelMesh.single(), 2)
    assert found is not None
    report = compare(reference, found, layout=f"micro {micro}", world_size=1)
    assert report.holds, report.first_failure()


@pytest.mark.parametrize("layout", ["dp=2", "dp=4", "dp=2,pp=2"])
def test_data_parallelism_does_not_matter(
    ranks: RankPool, prefix: Path, reference: Record, layout: str
) -> None:
    """U26: the same over data-parallel ranks."""
    parallel = ParallelConfig.parse(layout)
    config = dataclasses.replace(uneven(prefix, 1), parallel=parallel)
    world = parallel.pp * (parallel.dp or 1)
    found = ranks.run(record_rank, world, config_to_tree(config), 2, timeout=120)[0]
    report = compare(reference, found, layout=layout, world_size=world)
    assert report.holds, report.first_failure()


def test_what_the_loss_adds_is_cut_like_it(ranks: RankPool, prefix: Path) -> None:
    """Label smoothing and z-loss over a vocabulary that two ranks share, its columns padded."""
    added = uneven(prefix, 2, loss={"label_smoothing": 0.2, "z_loss": 1e-2})
    whole = record(added, ParallelMesh.single(), 2)
    config = dataclasses.replace(added, parallel=ParallelConfig.parse("tp=2,sp"))
    found = ranks.run(record_rank, 2, config_to_tree(config), 2, timeout=120)[0]
    assert whole is not None
    report = compare(whole, found, layout="tp=2,sp", world_size=2)
    assert report.holds, report.first_failure()


def test_what_the_loss_adds(prefix: Path) -> None:
    """It is what torch computes from the logits; validation goes without it."""
    smoothing, weight = 0.2, 1e-2
    plain = build_session(uneven(prefix, 4), ParallelMesh.single())
    terms = {"label_smoothing": smoothing, "z_loss": weight}
    session = build_session(uneven(prefix, 4, loss=terms), ParallelMesh.single())
    batches = next(session.data.batches())
    with torch.no_grad():
        logits = torch.cat([session.model.stage_forward(batch) for batch in batches]).double()
    logits = logits[:, : session.config.model.vocab_size]
    labels = torch.cat([batch.labels for batch in batches])
    mask = torch.cat([batch.loss_mask for batch in batches]).double()
    logs = logits.log_softmax(-1)
    target = logs.gather(1, labels[:, None])[:, 0]
    others = logs.sum(-1) - target
    losses = -(1 - smoothing) * target - smoothing / (logits.shape[1] - 1) * others
    losses += weight * logits.logsumexp(-1) ** 2
    expected = float((losses * mask).sum() / mask.sum())
    shares = Step(session).accumulate(batches, RngKey(0))
    assert float(shares.loss) == pytest.approx(expected, rel=1e-5)
    assert float(Step(plain).accumulate(batches, RngKey(0)).loss) < expected
    assert evaluate(session) == evaluate(plain)


def test_the_mean_is_over_tokens(prefix: Path) -> None:
    """U26 literally on real losses: micro-batches weigh by their valid tokens."""
    session = build_session(uneven(prefix, 1), ParallelMesh.single())
    batches = next(session.data.batches())
    sums, counts = [], []
    for batch in batches:
        assert batch.loss_mask is not None
        counts.append(float(batch.loss_mask.sum()))
        one = GlobalCounts(tokens=1.0)
        sums.append(float(session.model.loss(batch, counts=one).detach()))
    assert len(set(counts)) > 1
    found = Step(session).accumulate(batches, RngKey(0))
    share = found.loss
    assert found.tokens == sum(counts)
    assert float(share) == pytest.approx(sum(sums) / sum(counts), rel=1e-6)
    of_means = sum(s / c for s, c in zip(sums, counts, strict=True)) / len(sums)
    assert float(share) != pytest.approx(of_means, rel=1e-5)
    session.data.close()


def evaluate_rank(tree: dict[str, Any]) -> float:
    from mcore_parallel import init_from_env

    config = config_from_tree(tree)
    place = init_from_env(device="cpu")
    mesh = ParallelMesh.create(config.parallel, device=place.device)
    assert mesh is not None
    loss = evaluate(build_session(config, mesh))
    mesh.close()
    return loss


def test_validation_counts_every_window_once(ranks: RankPool, prefix: Path) -> None:
    """U16: three windows over one, two and four replicas give the same mean on every rank."""
    fields: dict[str, Any] = {"evaluate": {"windows": 3}}
    expected = evaluate(build_session(uneven(prefix, 1, **fields), ParallelMesh.single()))
    for layout in ("dp=2", "dp=4", "dp=2,tp=2"):
        parallel = ParallelConfig.parse(layout)
        config = dataclasses.replace(uneven(prefix, 1, **fields), parallel=parallel)
        world = parallel.tp * (parallel.dp or 1)
        losses = ranks.run(evaluate_rank, world, config_to_tree(config), timeout=60)
        assert len(set(losses)) == 1
        assert losses[0] == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_is_not_finite_stops_before_the_update(prefix: Path) -> None:
    session = build_session(uneven(prefix, 2), ParallelMesh.single())
    weight = session.model.get_parameter("layers.1.mlp.down.weight")
    with torch.no_grad():
        weight[0, 0] = float("nan")
    before = {name: p.detach().clone() for name, p in session.model.named_parameters()}
    step = Step(session)
    place = (
        r"update 1: loss nan .* first such gradient is embedding\.weight: \d+ of 1952 values on "
    )
    with pytest.raises(FloatingPointError, match=place + "rank 0 not finite"):
        step(next(session.data.batches()), lr=0.1, rng=RngKey(0))
    for name, parameter in session.model.named_parameters():
        assert torch.equal(parameter.nan_to_num(7.0), before[name].nan_to_num(7.0))
    session.data.close()


def test_bf16_keeps_fp32_masters(prefix: Path, tmp_path: Path) -> None:
    """Small updates that bf16 would lose add up in the masters."""
    config = dataclasses.replace(uneven(prefix, 2), precision="bf16")
    session = build_session(config, ParallelMesh.single())
    parameter = session.model.get_parameter("layers.0.mlp.gate_up.weight")
    assert parameter.dtype == torch.bfloat16
    masters = {
        key: value.tensor
        for key, value in session.optimizer.state_tensors().items()
        if key.startswith("model/")
    }
    assert {value.dtype for value in masters.values()} == {torch.float32}
    step = Step(session)
    batches = session.data.batches()
    losses = [step(next(batches), lr=3e-3, rng=RngKey(0)).loss for _ in range(20)]
    assert losses[-1] < losses[0] - 0.3
    session.data.close()
