import dataclasses

import pytest

from mcore_models import MoEConfig
from mcore_parallel import ParallelConfig
from mcore_train.data_config import BatchConfig, DataConfig
from mcore_train.load import config_from_tree

TOY = config_from_tree(
    {
        "steps": 4,
        "model": {"vocab_size": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 4},
        "data": {"mock": True, "seq_length": 12},
    }
)


def with_sequence(length: int, layout: str) -> None:
    dataclasses.replace(
        TOY, data=DataConfig(mock=True, seq_length=length), parallel=ParallelConfig.parse(layout)
    )


def test_sequence_must_divide_under_sequence_parallelism() -> None:
    """U02: sequence 10 over tp 4 is refused with the numbers before anything is built."""
    with pytest.raises(ValueError, match=r"(?=.*\b10\b)(?=.*\b4\b)(?=.*\b8\b)(?=.*\b12\b)"):
        with_sequence(10, "tp=4,sp")
    with_sequence(12, "tp=4,sp")
    with_sequence(10, "tp=4")


@pytest.mark.parametrize(
    ("size", "micro", "dp", "near"), [(10, 2, 2, "8 or 12"), (3, 2, 1, "2 or 4"), (2, 4, 1, "4")]
)
def test_global_batch_must_fit_the_replicas(size: int, micro: int, dp: int, near: str) -> None:
    """U03: global batch 10, micro-batch 2, dp 2 names 10, 4 and the neighbours 8 and 12."""
    config = dataclasses.replace(TOY, batch=BatchConfig(global_size=size, micro_size=micro))
    with pytest.raises(ValueError, match=rf"{size} .* = {micro * dp}: use global_size {near}$"):
        config.check_world(dp)


def test_world_plan() -> None:
    config = dataclasses.replace(
        TOY,
        batch=BatchConfig(global_size=12, micro_size=2),
        parallel=ParallelConfig.parse("tp=2,pp=2"),
    )
    plan = config.check_world(12)
    assert (plan.parallel.dp, plan.micro_batches) == (3, 2)
    with pytest.raises(ValueError, match="6"):
        config.check_world(6)


def test_turns_are_taken_with_another_micro_batch() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, expert_ffn_size=8)
    config = dataclasses.replace(
        TOY,
        model=dataclasses.replace(TOY.model, moe=moe, pattern=("*E",) * 4),
        batch=BatchConfig(global_size=4, micro_size=2),
        parallel=ParallelConfig.parse("ep=2,overlap-experts"),
    )
    message = r"batch.global_size=4 is one of each replica .* = 4\): use global_size 8 or more"
    with pytest.raises(ValueError, match=message):
        config.check_world(2)
    more = dataclasses.replace(config, batch=BatchConfig(global_size=8, micro_size=2))
    assert more.check_world(2).micro_batches == 2


def test_more_stages_than_layers() -> None:
    config = dataclasses.replace(TOY, parallel=ParallelConfig(pp=8))
    with pytest.raises(ValueError, match="num_layers=4 is fewer than pp=8: use pp 4 or less"):
        config.check_world(8)
