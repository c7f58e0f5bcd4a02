"""The loss from partial results over shards of the vocabulary."""

import pytest
import torch
import torch.nn.functional as F

from mcore_kernels import OPERATORS, Target, VocabLossOp, resolve

CPU = Target()
NAMES = [one.name for one in OPERATORS["cross_entropy"].implementations if not one.refusal(CPU)]


def sharded(
    op: VocabLossOp, logits: torch.Tensor, labels: torch.Tensor, shards: int, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of its sum, reduced over the shards as ranks would."""
    parts = logits.chunk(shards, dim=1)
    width, classes = parts[0].shape[1], logits.shape[1]
    local = [labels - i * width for i in range(shards)]
    maximum = torch.stack([op.local_max(part) for part in parts]).amax(0)
    sums = torch.zeros(3, logits.shape[0], dtype=maximum.dtype)
    for part, label in zip(parts, local, strict=True):
        sums += op.partials(part, label, maximum, smoothing=smoothing > 0)
    on_all = smoothing / (classes - 1)
    on_target = 1 - smoothing - on_all
    loss = sums[0].log() - on_target * sums[1] - on_all * sums[2]
    gradient = torch.empty_like(logits)
    for part, label, out in zip(parts, local, gradient.chunk(shards, dim=1), strict=True):
        op.backward(
            part,
            label,
            maximum,
            sums[0],
            torch.ones_like(maximum),
            on_target=on_target,
            on_all=on_all,
            out=out,
        )
    return loss, gradient


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_smoothing_over_the_other_classes(name: str, shards: int) -> None:
    """The arithmetic of U23: the smoothing mass is spread over the other classes."""
    op = resolve("cross_entropy", target=CPU, require=name)
    logits, labels = torch.arange(8.0).unsqueeze(0), torch.tensor([3])
    loss, gradient = sharded(op, logits, labels, shards, 0.1)
    assert loss.item() == pytest.approx(4.401197, abs=2e-6)
    target = torch.full((1, 8), 0.1 / 7)
    target[0, 3] = 0.9
    torch.testing.assert_close(gradient, logits.softmax(-1) - target)
    loss, gradient = sharded(op, logits * 1000, labels, shards, 0.1)
    assert bool(loss.isfinite().all())
    torch.testing.assert_close(gradient, (logits * 1000).softmax(-1) - target)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_a_log_probability_on_every_shard(name: str) -> None:
    """The arithmetic of U25: the shard without the token gets its part of the gradient too."""
    op = resolve("cross_entropy", target=CPU, require=name)
    _, gradient = sharded(op, torch.arange(4.0).unsqueeze(0), torch.tensor([3]), 2, 0.0)
    expected = torch.tensor([[-0.0321, -0.0871, -0.2369, 0.3561]])
    torch.testing.assert_close(-gradient, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_against_torch_over_many_chunks(name: str) -> None:
    op = resolve("cross_entropy", target=CPU, require=name)
    logits = torch.randn(53, 9001, requires_grad=True)
    labels = torch.randint(9001, (53,))
    expected = F.cross_entropy(logits, labels, reduction="none")
    expected.sum().backward()
    loss, gradient = sharded(op, logits.detach(), labels, 1, 0.0)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, logits.grad)


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_of_a_padded_shard(name: str) -> None:
    """Row strides above V, in and out; the padding is neither read nor written."""
    op = resolve("cross_entropy", target=CPU, require=name)
    wide, out = torch.full((4, 12), torch.nan), torch.full((4, 12), -7.0)
    wide[:, :9] = torch.randn(4, 9)
    logits, labels = wide[:, :9], torch.tensor([0, 8, 4, 4])
    maximum = op.local_max(logits)
    sums = op.partials(logits, labels, maximum, smoothing=False)
    ones = torch.ones(4)
    op.backward(logits, labels, maximum, sums[0], ones, on_target=1.0, on_all=0.0, out=out[:, :9])
    torch.testing.assert_close(out[:, :9], logits.softmax(-1) - F.one_hot(labels, 9))
    assert bool((out[:, 9:] == -7.0).all())


@pytest.mark.parametrize("name", NAMES)
def test_gradient_into_another_dtype(name: str) -> None:
    op = resolve("cross_entropy", target=CPU, require=name)
    logits, labels = torch.randn(4, 9).bfloat16(), torch.tensor([0, 8, 4, -1])
    maximum = op.local_max(logits)
    assert maximum.dtype == torch.float32
    sums = op.partials(logits, labels, maximum, smoothing=False)
    assert sums[1, 3].item() == 0.0  # a label of another shard
    out = torch.empty(4, 9)
    grad = torch.ones(4)
    op.backward(logits, labels, maximum, sums[0], grad, on_target=1.0, on_all=0.0, out=out)
    expected = logits.float().softmax(-1)
    expected[:3] -= F.one_hot(labels[:3], 9)
    torch.testing.assert_close(out, expected)
