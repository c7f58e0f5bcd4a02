import pytest
import torch

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_the_same() -> None:
    rule = AdamW(beta1=0.9, beta2=0.95, eps=1e-8)
    values = [torch.randn(100_003, device=device) for device in ("cpu", "cuda")]
    values[1].copy_(values[0])
    states = [rule.init(value) for value in values]
    for step in range(1, 4):
        grad = torch.randn(100_003)
        for value, state in zip(values, states, strict=True):
            on = grad.to(value.device)
            rule.update(value, on, state, lr=1e-3, weight_decay=0.1, step=step)
            assert on.cpu().equal(grad)
    torch.testing.assert_close(values[1].cpu(), values[0], atol=1e-6, rtol=1e-6)
    for name in rule.state_names:
        torch.testing.assert_close(states[1][name].cpu(), states[0][name], atol=1e-7, rtol=1e-5)
