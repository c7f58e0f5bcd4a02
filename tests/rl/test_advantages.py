import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl import group_advantages


def test_known_values() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 4.0]], dtype=torch.float64)
    centred = torch.tensor([[0.5, -0.5, -0.5, 0.5], [-1, -1, -1, 3]], dtype=torch.float64)
    assert group_advantages(rewards, kind="dr_grpo").equal(centred)
    torch.testing.assert_close(group_advantages(rewards, kind="rloo"), centred * 4 / 3)
    std = torch.tensor([[0.5], [3**0.5]], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(rewards, eps=1e-12), centred / std)


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    rewards = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    others = (rewards.sum(1, keepdim=True) - rewards) / 4
    torch.testing.assert_close(group_advantages(rewards, kind="rloo"), rewards - others)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_have_no_advantage(kind: str) -> None:
    assert not group_advantages(torch.full((2, 7), 0.1), kind=kind).any()  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(0, 10**6))
def test_rows_sum_to_zero_and_do_not_see_each_other(groups: int, size: int, seed: int) -> None:
    rewards = torch.randn(
        groups, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    for kind in ("grpo", "dr_grpo", "rloo"):
        together = group_advantages(rewards, kind=kind)  # type: ignore[arg-type]
        assert together.sum(1).abs().max() < 1e-9
        alone = group_advantages(rewards[:1], kind=kind)  # type: ignore[arg-type]
        torch.testing.assert_close(together[:1], alone)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (torch.zeros(3), r"\[groups, rollouts\], got \[3\]"),
        (torch.zeros(2, 3, dtype=torch.int64), "floating"),
        (torch.zeros(2, 1), "at least 2"),
        (torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]), "rollout 0 in group 1 is nan"),
    ],
)
def test_wrong_rewards(rewards: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="none of grpo"):
        group_advantages(torch.tensor([[0.0, 1.0]]), kind="ppo")  # type: ignore[arg-type]
