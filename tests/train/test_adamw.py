import pytest
import torch

from mcore_kernels import Target, resolve
from mcore_train.optim import AdamW


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_the_formula(weight_decay: float) -> None:
    """Against the published recurrence, written out element by element in Python."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(5, dtype=torch.float64, generator=generator)
    rule = AdamW(beta1=0.9, beta2=0.95, eps=1e-3)
    state = rule.init(value)
    plain = [[x, 0.0, 0.0] for x in value.tolist()]
    for step in range(1, 6):
        grad = torch.randn(5, dtype=torch.float64, generator=generator)
        before = grad.clone()
        rule.update(value, grad, state, lr=0.01 * step, weight_decay=weight_decay, step=step)
        assert grad.equal(before)
        for row, g in zip(plain, grad.tolist(), strict=True):
            row[1] = 0.9 * row[1] + 0.1 * g
            row[2] = 0.95 * row[2] + 0.05 * g * g
            mean, square = row[1] / (1 - 0.9**step), row[2] / (1 - 0.95**step)
            row[0] -= 0.01 * step * (weight_decay * row[0] + mean / (square**0.5 + 1e-3))
    for index, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        assert state[name].tolist() == pytest.approx([row[index] for row in plain], rel=1e-12)
    assert value.tolist() == pytest.approx([row[0] for row in plain], rel=1e-12)


def test_state_is_named_for_checkpoints() -> None:
    rule = AdamW()
    assert rule.state_names == tuple(rule.init(torch.zeros(3, 2))) == ("exp_avg", "exp_avg_sq")


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_one_pass_is_three(device: str) -> None:
    """Scaling, the update and the rounded copy at once, by the operator of the device."""
    op = resolve("adam", target=Target.of(device, dtype=torch.float32))
    once, plain = AdamW(eps=1e-8, op=op), AdamW(eps=1e-8)
    value = torch.randn(10_003)
    there = value.to(device)
    copy = torch.zeros(10_003, dtype=torch.bfloat16, device=device)
    states = [plain.init(value), once.init(there)]
    for step in range(1, 4):
        grad = torch.randn(10_003)
        on = grad.to(device, copy=True)
        numbers = {"lr": 1e-3, "weight_decay": 0.1, "step": step}
        plain.update(value, grad * 0.25, states[0], **numbers)
        once.update_once(there, on, states[1], **numbers, grad_scale=0.25, copy=copy)
        assert on.cpu().equal(grad)
        assert copy.equal(there.bfloat16())
    torch.testing.assert_close(there.cpu(), value, atol=1e-6, rtol=1e-6)
    for name in plain.state_names:
        torch.testing.assert_close(states[1][name].cpu(), states[0][name], atol=1e-7, rtol=1e-5)


def test_the_copy_is_the_value_rounded() -> None:
    rule, value, grad = AdamW(), torch.randn(7), torch.randn(7)
    other, copy = value.clone(), torch.zeros(7, dtype=torch.bfloat16)
    states = rule.init(value), rule.init(other)
    rule.update(value, grad * 0.5, states[0], lr=0.1, weight_decay=0.1, step=1)
    rule.update_once(
        other, grad, states[1], lr=0.1, weight_decay=0.1, step=1, grad_scale=0.5, copy=copy
    )
    assert other.equal(value)
    assert copy.equal(value.bfloat16())
