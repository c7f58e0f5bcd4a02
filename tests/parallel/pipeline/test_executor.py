"""The executor on real gloo stages against one process without any."""

import time
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
    DeferredGradients,
    Line,
    PipelineError,
    gpipe,
    make_schedule,
    one_f_one_b,
    run_schedule,
)
from mcore_parallel.pipeline.inbox import Inbox
from mcore_parallel.tensor import ColumnParallelLinear

WIDTH = 6
LENGTHS = [3, 7, 5, 2]
LAYERS = 8


class Layers(nn.Module):
    """Some of eight layers, each initialised by its own index, so that every split is one model."""

    def __init__(self, which, total=LAYERS):
        super().__init__()
        self.first, self.last = 0 in which, total - 1 in which
        self.layers = nn.ModuleDict()
        for i in which:
            linear = ColumnParallelLinear(WIDTH, WIDTH, bias=True)
            layer = nn.Sequential(linear, nn.LayerNorm(WIDTH)) if i % 2 else linear
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
    return [part.tolist() for part in np.array_split(np.arange(LAYERS), world)]


def made(kind, p, m, chunks=2):
    return make_schedule(kind, p, m, chunks=chunks if kind in ("interleaved", "zb-v") else 1)


def train_stage(kind, lengths, device, chunks=2):
    pp = Group.world()
    schedule = made(kind, pp.size, len(lengths), chunks)
    line, actions = schedule.line, schedule[pp.rank]
    parts = cut(line.last + 1)
    models = nn.ModuleList(
        Layers(parts[line.position(pp.rank, chunk)]).to(device) for chunk in range(line.num_chunks)
    )
    micro_batches = [x.to(device) for x in batches(lengths)]
    later = DeferredGradients(models.parameters()) if schedule.splits_backward else None
    with Channel(pp, device=device) as channel:
        losses = run_schedule(
            actions, list(models), micro_batches, channel, line=line, weight_gradients=later
        )
        evaluated = run_schedule(
            actions, list(models), micro_batches, channel, line=line, forward_only=True
        )
    return (
        [loss.cpu() for loss in losses],
        [loss.cpu() for loss in evaluated],
        {name: grad.cpu() for model in models for name, grad in model.gradients().items()},
    )


def train_alone(lengths):
    model = Layers(range(LAYERS))
    losses = [model(x, None) for x in batches(lengths)]
    torch.autograd.backward(losses)
    return [loss.detach() for loss in losses], model.gradients()


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_split_equals_one_process(ranks, kind, world):
    """U32: micro-batches of length 3, 7, 5, 2 (and of length 0), over 1 to 4 stages."""
    compare(ranks, kind, world, "cpu")


@pytest.mark.parametrize(("world", "chunks"), [(2, 3), (2, 4), (3, 2)])
def test_more_chunks_equal_one_process(ranks, world, chunks):
    """U32: interleaved, with more chunks; 5 micro-batches are no multiple of 2 or 3 stages."""
    compare(ranks, "interleaved", world, "cpu", lengths=[*LENGTHS, 4], chunks=chunks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_stages_on_gpus_equal_one_process(ranks, kind):
    """U32 over NCCL, with as many stages as there are GPUs up to four."""
    compare(ranks, kind, min(4, torch.cuda.device_count()), "cuda")


def compare(ranks, kind, world, device, lengths=(*LENGTHS, 0, 4), chunks=2):
    expected, gradients = train_alone(lengths)
    stages = ranks.run(train_stage, world, kind, lengths, device, chunks, device=device)
    found = {}
    end = 0 if kind == "zb-v" else world - 1
    for rank, (losses, evaluated, grads) in enumerate(stages):
        found |= grads
        if rank != end:
            assert losses == evaluated == []
    losses, evaluated, _ = stages[end]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert all(a.equal(b) for a, b in zip(losses, evaluated, strict=True))
    # A GPU adds in another order.
    close = {"rtol": 1e-5, "atol": 1e-6} if device == "cpu" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, gradients, **close)


def test_one_stage_needs_no_process_group():
    model = Layers(range(LAYERS))
    losses = run_schedule(one_f_one_b(1, 4)[0], model, batches(LENGTHS), Group.single())
    expected, gradients = train_alone(LENGTHS)
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    torch.testing.assert_close(model.gradients(), gradients, rtol=1e-5, atol=1e-6)


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
    run_schedule(made(kind, pp.size, m)[pp.rank], stage, batches([4] * m), pp)
    return max(seen)


def test_a_stage_keeps_outputs_only_until_they_have_been_used(ranks):
    """1F1B has a few outputs alive, however many micro-batches there are."""
    assert ranks.run(count_outputs, 3, "1f1b") == [2, 1, 0]  # as a forward begins


def note_arrivals():
    """Whether each message of stage 0 is there when stage 1, which is slower, takes it."""
    pp = Group.world()
    here = []
    take = Inbox.take

    def noted(self, stage, timeout):
        here.append(not self._here[stage].empty())
        return take(self, stage, timeout)

    def stage(tokens, hidden):
        if pp.rank == 1:
            time.sleep(0.1)
        return tokens if hidden is None else hidden.sum()

    Inbox.take = noted
    try:
        run_schedule(
            gpipe(2, 4).forward_only()[pp.rank], stage, batches([5] * 4), pp, forward_only=True
        )
    finally:
        Inbox.take = take
    return here


def test_messages_arrive_while_the_stage_computes(ranks):
    assert ranks.run(note_arrivals, 2)[1][1:] == [True] * 3


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
    model = Layers(range(LAYERS))
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
        ([Action(kind, 0, 0, 0) for kind in "FBW"], 1, r"pass weight_gradients=DeferredGradients"),
    ],
)
def test_lists_that_do_not_fit(actions, count, message):
    with pytest.raises(ValueError, match=message):
        run_schedule(actions, Layers(range(LAYERS)), batches([2] * count), Group.single())


def test_a_line_that_does_not_fit():
    line = Line(num_stages=2, num_chunks=2, zigzag=True)
    with pytest.raises(ValueError, match="2 stages of 2 chunks, but there are 2 of 1"):
        run_schedule(one_f_one_b(2, 1)[0], print, [0], Group(0, 2, (0, 1)), line=line)


def test_a_loss_is_a_scalar():
    with pytest.raises(PipelineError, match=r"scalar loss, not a tensor of shape \[2, 6\]"):
        run_schedule(one_f_one_b(1, 1)[0], lambda x, _: x, batches([2]), Group.single())


def test_a_stage_that_fails_closes_the_pipeline(ranks):
    """The others hear of it at once, wherever they are, and say whose fault it is."""
    first, failed, last = ranks.run(report_failure, 3)
    what = "F of chunk 0, micro-batch 0: ValueError: seven is odd"
    assert failed == f"rank 1, pipeline stage 1, {what}"
    for stage, said in ((0, first), (2, last)):
        assert said.startswith(f"rank {stage}, pipeline stage {stage}, ")
        assert said.endswith(f": connection closed: rank 1 (stage 1) failed in {what}")


def report_failure():
    try:
        fail_on(1, 0)
    except PipelineError as error:
        return str(error)
