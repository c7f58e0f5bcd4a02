import math

import pytest

from mcore_train.config import ScheduleConfig, ScheduleKind
from mcore_train.schedules import learning_rate


def rates(total: int, steps: int | None = None, **fields: object) -> list[float]:
    config = ScheduleConfig(**fields)  # type: ignore[arg-type]
    return [learning_rate(config, step, total) for step in range(steps or total)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_rises_to_the_full_rate(kind: ScheduleKind) -> None:
    values = rates(20, kind=kind, lr=1.0, min_lr=0.1, warmup_steps=4)
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_cosine() -> None:
    values = rates(8, steps=13, kind="cosine", lr=1.0, min_lr=0.2)
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.6)
    assert values[2] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))
    assert values[8:] == pytest.approx([0.2] * 5)


def test_linear_with_its_own_decay() -> None:
    values = rates(100, steps=9, kind="linear", lr=1.0, min_lr=0.0, warmup_steps=1, decay_steps=4)
    assert values[1:] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0, 0, 0, 0])


def test_wsd_decays_at_the_end() -> None:
    values = rates(10, steps=12, kind="wsd", lr=1.0, min_lr=0.5, decay_steps=4)
    assert values[:7] == [1.0] * 7
    assert values[7:] == pytest.approx([0.875, 0.75, 0.625, 0.5, 0.5])
    assert rates(100, kind="wsd", lr=1.0, min_lr=0.5).count(1.0) == 81


def test_constant() -> None:
    assert set(rates(7, kind="constant", lr=0.3, min_lr=0.1)) == {0.3}


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_never_outside_its_bounds_and_never_rising_after_warm_up(kind: ScheduleKind) -> None:
    for warmup in (0, 3, 10):
        values = rates(10, steps=30, kind=kind, lr=1.0, min_lr=0.1, warmup_steps=warmup)
        assert all(0 < value <= 1 for value in values)
        after = values[warmup:]
        assert after == sorted(after, reverse=True)
        assert after[-1] == pytest.approx(0.1)
