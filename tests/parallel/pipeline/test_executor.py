"""The executor on real gloo stages against one process without any."""

import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from mcore_parallel.group import Group
from mcore_parallel.pipeline import (
    SCHEDULES,
    Action,
    Channel,
    PipelineError,
    one_f_one_b,
    run_schedule,
)

WIDTH = 6
LENGTHS = [3, 7, 5, 2]


class Layers(nn.Module):
    """Some of six layers, each initialised by its own index, so that every split is one model."""

    def __init__(self, which, total=6):
        super().__init__()
        self.first, self.last = 0 in which, total - 1 in which
        self.layers = nn.ModuleDict()
        for i in which:
            layer = nn.Linear(WIDTH, WIDTH)
            generator = torch.Generator().manual_seed(i)
            with torch.no_grad():
                for param in layer.parameters():
                    param.normal_(generator=generator)
            self.layers[str(i)] = layer

    def forward(self, tokens, hidden):
        assert (hidden is None) == self.first
        x = tokens if self.first else hidden
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return (x * tokens).sum() if self.last else x

    def gradients(self):
        return {name: param.grad for name, param in self.named_parameters()}


def batches(lengths, dtype=torch.float32):
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(n, WIDTH, generator=generator).to(dtype) for n in lengths]


def cut(world):
    return [part.tolist() for part in np.array_split(np.arange(6), world)]


def train_stage(kind, lengths, device):
    pp = Group.world()
    model = Layers(cut(pp.size)[pp.rank]).to(device)
    micro_batches = [x.to(device) for x in batches(lengths)]
    actions = SCHEDULES[kind](pp.size, len(lengths))[pp.rank]
    with Channel(pp, device=device) as channel:
        losses = run_schedule(actions, model, micro_batches, channel)
        evaluated = run_schedule(actions, model, micro_batches, channel, forward_only=True)
    return (
        [loss.cpu() for loss in losses],
        [loss.cpu() for loss in evaluated],
        {name: grad.cpu() for name, grad in model.gradients().items()},
    )


def train_alone(lengths):
    model = Layers(range(6))
    losses = [model(x, None) for x in batches(lengths)]
    torch.autograd.backward(losses)
    return [loss.detach() for loss in losses], model.gradients()


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_split_equals_one_process(ranks, kind, world):
    """U32: micro-batches of length 3, 7, 5, 2 (and of length 0), over 1 to 4 stages."""
    compare(ranks, kind, world, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_stages_on_gpus_equal_one_process(ranks, kind):
    """U32 over NCCL, with as many stages as there are GPUs up to four."""
    compare(ranks, kind, min(4, torch.cuda.device_count()), "cuda")


def compare(ranks, kind, world, device):
    lengths = [*LENGTHS, 0, 4]
    expected, gradients = train_alone(lengths)
    stages = ranks.run(train_stage, world, kind, lengths, device, device=device)
    found = {}
    for rank, (losses, evaluated, grads) in enumerate(stages):
        found |= grads
        if rank < world - 1:
            assert losses == evaluated == []
    losses, evaluated, _ = stages[-1]
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert all(a.equal(b) for a, b in zip(losses, evaluated, strict=True))
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-6)


def test_one_stage_needs_no_process_group():
    model = Layers(range(6))
    losses = run_schedule(one_f_one_b(1, 4)[0], model, batches(LENGTHS), Group.single())
    expected, gradients = train_alone(LENGTHS)
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    torch.testing.assert_close(model.gradients(), gradients, rtol=1e-5, atol=1e-6)


def interleaved(world=2, chunks=2):
    """One micro-batch through two chunks on each of two stages."""
    lists = [[] for _ in range(world)]
    line = [(c, s) for c in range(chunks) for s in range(world)]
    for position, (chunk, stage) in enumerate(line):
        kinds = ["RECV_F"] * (position > 0) + ["F"] + ["SEND_F"] * (position < len(line) - 1)
        lists[stage] += [Action(kind, stage, chunk, 0) for kind in kinds]
    for position, (chunk, stage) in reversed(list(enumerate(line))):
        kinds = ["RECV_B"] * (position < len(line) - 1) + ["B"] + ["SEND_B"] * (position > 0)
        lists[stage] += [Action(kind, stage, chunk, 0) for kind in kinds]
    return lists


def train_chunks():
    pp = Group.world()
    parts = cut(4)
    chunks = [Layers(parts[pp.rank]), Layers(parts[2 + pp.rank])]
    losses = run_schedule(interleaved()[pp.rank], chunks, batches([5]), pp)
    return losses, chunks[0].gradients() | chunks[1].gradients()


def test_several_chunks_on_a_stage(ranks):
    """U32: the same loop runs interleaved lists."""
    expected, gradients = train_alone([5])
    (none, first), (losses, second) = ranks.run(train_chunks, 2)
    assert none == []
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(first | second, gradients, rtol=1e-5, atol=1e-6)


class FromNumpy(torch.autograd.Function):
    """x + 1 in memory whose end can be observed; its backward needs nothing of it."""

    alive: list[weakref.ref] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        memory = x.detach().numpy() + 1
        FromNumpy.alive.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    @staticmethod
    def backward(ctx, grad):
        return grad


def count_outputs(kind):
    pp = Group.world()
    FromNumpy.alive.clear()
    seen = []
    weight = nn.Parameter(torch.ones(WIDTH))

    def stage(tokens, hidden):
        seen.append(sum(ref() is not None for ref in FromNumpy.alive))
        x = tokens if hidden is None else hidden
        return FromNumpy.apply(x * weight) if pp.rank < pp.size - 1 else (x * weight).sum()

    m = 12
    actions = SCHEDULES[kind](pp.size, m)[pp.rank]
    run_schedule(actions, stage, batches([4] * m), pp)
    return max(seen)


def test_a_stage_keeps_outputs_only_until_they_have_been_used(ranks):
    """1F1B has a few outputs alive, however many micro-batches there are."""
    assert ranks.run(count_outputs, 3, "1f1b") == [2, 1, 0]  # as a forward begins


def record_around():
    pp = Group.world()
    log = []

    @contextmanager
    def around(action, last):
        log.append(f"{action.kind}{action.micro_batch}{'!' if last else ''}")
        yield
        log.append("end")

    model = Layers(cut(pp.size)[pp.rank])
    actions = one_f_one_b(pp.size, 3)[pp.rank]
    run_schedule(actions, model, batches([2, 2, 2]), pp, around=around)
    return [entry for entry in log if entry != "end"], len(log)


def test_the_hook_knows_the_last_backward(ranks):
    first, last = ranks.run(record_around, 2)
    assert first == (["F0", "F1", "B0", "F2!", "B1", "B2!"], 12)
    assert last == (["F0", "B0", "F1", "B1", "F2!", "B2!"], 12)


def fail_on(rank, micro_batch):
    pp = Group.world()
    model = Layers(cut(pp.size)[pp.rank])
    count = iter(range(100))

    def stage(tokens, hidden):
        if next(count) == micro_batch and pp.rank == rank:
            raise ValueError("seven is odd")
        return model(tokens, hidden)

    run_schedule(one_f_one_b(pp.size, 4)[pp.rank], stage, batches(LENGTHS), pp)


def test_an_error_names_rank_stage_and_action(ranks):
    with pytest.raises(PipelineError) as caught:
        ranks.run(fail_on, 3, 1, 2, timeout=20)
    assert str(caught.value) == (
        "rank 1, pipeline stage 1, F of chunk 0, micro-batch 2: ValueError: seven is odd"
    )
    assert caught.value.action == Action("F", 1, 0, 2)


def send_odd_tensors():
    pp = Group.world()
    tensors = [
        torch.arange(6).view(2, 3).t(),
        torch.ones(2, 1, 2, dtype=torch.bfloat16),
        torch.empty(0, 5),
        torch.tensor(True),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    with Channel(pp) as channel:
        if pp.rank == 0:
            for tensor in tensors:
                channel.send(tensor, 1)
            channel.flush()
            return [channel.receive(1).wait() for _ in tensors]
        messages = [channel.receive(0) for _ in tensors]
        for message in messages:
            channel.send(message.wait(), 0)
        channel.flush()
        return tensors


def test_any_shape_and_dtype_passes(ranks):
    back, sent = ranks.run(send_odd_tensors, 2)
    torch.testing.assert_close(back, sent, rtol=0, atol=0)


def test_a_tensor_that_no_header_describes():
    channel = Channel(Group(0, 2, (0, 1)))
    with pytest.raises(ValueError, match="complex64 and 1 dimensions cannot pass"):
        channel.send(torch.ones(1, dtype=torch.complex64), 1)


def test_a_frozen_model_runs_without_a_backward():
    model = Layers([0, 1, 2, 3, 4, 5])
    model.requires_grad_(False)
    losses = run_schedule(one_f_one_b(1, 1)[0], model, batches([2]), Group.single())
    assert losses[0].dim() == 0
    assert all(grad is None for grad in model.gradients().values())


def ignore_input():
    pp = Group.world()
    weight = nn.Parameter(torch.ones(WIDTH))

    def stage(tokens, hidden):
        return tokens * weight if pp.rank == 0 else (tokens * weight).sum()

    run_schedule(one_f_one_b(2, 1)[pp.rank], stage, batches([2]), pp)
    return weight.grad


def test_an_unused_input_gets_gradient_zero(ranks):
    first, last = ranks.run(ignore_input, 2)
    assert first.count_nonzero() == 0
    assert last.count_nonzero() == WIDTH


@pytest.mark.parametrize(
    ("actions", "count", "message"),
    [
        (one_f_one_b(2, 1)[1], 1, "for stage 1, this is stage 0"),
        (one_f_one_b(1, 2)[0], 3, "2 micro-batches and 1 chunks on stage 0, but 3 micro-batches"),
        ([Action(kind, 0, 0, 0) for kind in "FBW"], 1, "W of chunk 0, .* whole backwards"),
    ],
)
def test_lists_that_do_not_fit(actions, count, message):
    with pytest.raises(ValueError, match=message):
        run_schedule(actions, Layers(range(6)), batches([2] * count), Group.single())


def test_a_loss_is_a_scalar():
    with pytest.raises(PipelineError, match=r"scalar loss, not a tensor of shape \[2, 6\]"):
        run_schedule(one_f_one_b(1, 1)[0], lambda x, _: x, batches([2]), Group.single())
