"""Which tasks a run plays, and when it may go on with them."""

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mcore_data import ByteTokenizer, load_tokenizer
from mcore_rl import RLConfig, Tasks, held_out_tasks, make_environment

sys.path.append(str(Path(__file__).parent))
from small_runs import config


def tasks(**sections: Any) -> Tasks:
    return Tasks(config(**sections), ByteTokenizer(), reference=Path("/some/step"))


def taken(source: Tasks, steps: int) -> list[list[int]]:
    return list(islice(source.batches(), steps))


def test_a_task_is_played_once_and_its_order_follows_from_the_seed() -> None:
    first = taken(tasks(), 50)
    assert {len(step) for step in first} == {4}  # 16 rollouts in groups of 4
    flat = [task for step in first for task in step]
    assert len(set(flat)) == 200
    assert taken(tasks(), 50) == first
    assert not set(flat) & {t for step in taken(tasks(seed=6), 50) for t in step}
    assert taken(tasks(batch={"global_size": 32}), 25) == [
        [*a, *b] for a, b in zip(first[::2], first[1::2], strict=True)
    ]


def test_held_out_tasks_are_not_trained_on() -> None:
    trained = {task for step in taken(tasks(), 100) for task in step}
    assert not trained & set(held_out_tasks(500))
    assert held_out_tasks(3) == held_out_tasks(5)[:3]
    environment = make_environment("count_on")
    seen = {environment.reset(task) for task in trained}
    fresh = [environment.reset(task) for task in held_out_tasks(100)]
    assert sum(prompt in seen for prompt in fresh) < 5


def test_going_on() -> None:
    expected = taken(tasks(), 5)
    source = tasks()
    state = source.state_dict(consumed=3 * 16)
    other = Tasks(config(), ByteTokenizer())
    other.load_state_dict(state)
    assert taken(other, 2) == expected[3:]
    assert other.reference == Path("/some/step")  # that of the run's start, not of this config


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"seed": 9}, "seed=5, the config says 9: use 5, or start with checkpoint.reset_step"),
        ({"rollout": {"group_size": 8}}, "group_size=4, the config says 8"),
        ({"environment": {"options": {"turns": 3}}}, "options={}, the config says {'turns': 3}"),
        ({"environment": {"name": "chain_sum"}}, "environment=small_runs:Evenness"),
    ],
)
def test_other_tasks_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks(**sections).load_state_dict(tasks().state_dict(consumed=16))


def test_a_checkpoint_of_pretraining_gives_its_weights_only() -> None:
    with pytest.raises(ValueError, match="take its weights alone"):
        tasks().load_state_dict({"consumed_samples": 4, "seq_length": 8})


def test_the_tokenizer_travels_with_the_checkpoint(tmp_path: Path) -> None:
    for name, content in tasks().files().items():
        assert isinstance(content, bytes)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert load_tokenizer(tmp_path / "tokenizer") == ByteTokenizer()


def test_there_is_no_validation_text() -> None:
    assert not tasks().validation_sets
    assert tasks().validation_batches("validation") == []
    assert isinstance(tasks().config, RLConfig)
