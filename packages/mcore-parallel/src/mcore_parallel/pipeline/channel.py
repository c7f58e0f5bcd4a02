"""Messages between pipeline stages: tensors of any shape and dtype, asynchronous both ways."""

from __future__ import annotations

import datetime
from collections import deque
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mcore_parallel import _torch
from mcore_parallel.collectives import Work
from mcore_parallel.group import Group

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_MAX_DIMS = 8
_HEADER = 2 + _MAX_DIMS  # index of the dtype, number of dimensions, their sizes
_PATIENCE = datetime.timedelta(minutes=30)  # torch's own default for gloo
_LONG = datetime.timedelta(days=30)


class Message:
    """A tensor on its way here."""

    def __init__(self, tensor: Tensor, work: Work | None) -> None:
        self._tensor = tensor
        self._work: Any = work

    def wait(self, timeout: datetime.timedelta | None = None) -> Tensor:
        """Return the tensor once it may be used (on CUDA: by the current stream).

        RuntimeError when the rest of it has not come within `timeout` (on CUDA nobody waits here).
        """
        if self._work is not None:
            on_cpu = self._tensor.device.type == "cpu"
            self._work.wait(timeout) if on_cpu and timeout is not None else self._work.wait()
            self._work = None
            if self._tensor.is_cuda:  # it may have been made for another stream
                self._tensor.record_stream(torch.cuda.current_stream(self._tensor.device))
        return self._tensor


class Sending:
    """A tensor on its way out, kept alive until it has left."""

    def __init__(self, header: Any, payload: Any, tensors: list[Tensor]) -> None:
        self._header = header
        self._payload = payload
        self._tensors = tensors

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Return once it has left (on CUDA: for the current stream), and let go of it.

        RuntimeError when the other side has not received it within `timeout`.
        """
        on_cpu = all(tensor.device.type == "cpu" for tensor in self._tensors)
        for work in (self._header, self._payload if on_cpu else None):
            if work is not None:
                work.wait() if timeout is None else work.wait(timeout)
        if self._payload is not None and not on_cpu:
            self._payload.wait()  # with a timeout NCCL would make the host wait, too
        self._header = self._payload = None
        self._tensors = []

    @property
    def is_done(self) -> bool:
        """Whether it is known to have left. gloo does not know before it is asked to wait."""
        if self._payload is None:
            return self._header is None
        # The payload is received after its header.
        return bool(self._payload.is_completed())


class Channel:
    """Point-to-point messages among the stages of `pp`, in order between any two of them.

    Each tensor follows a small header with its shape and dtype, so that lengths may vary from one
    micro-batch to the next and nobody has to agree on them beforehand. Headers travel over the
    group's CPU twin: waiting for one never waits for a device.

    With NCCL a send occupies its communicator until the other side receives, and a pair of ranks
    shares one for both directions: two stages that send each other activations and gradients would
    block each other. So messages to a higher rank and to a lower one use two process groups. The
    second one is made here, by all stages together; `close()` destroys it.

    device: where tensors come from and go to, `mesh.device`. timeout: how long `run_schedule` waits
    for a message before it raises and names who is in the way; default `pp.timeout`, else half an
    hour.
    """

    def __init__(
        self,
        pp: Group,
        *,
        device: torch.device | str = "cpu",
        timeout: datetime.timedelta | None = None,
    ) -> None:
        self.group = pp
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            # A number, since threads that receive have another current device.
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.timeout = timeout or pp.timeout or _PATIENCE
        self.runs = 0
        self._headers = self._up = self._down = pp
        self._made: Group | None = None
        if pp.size > 1:
            self._headers = pp.cpu
        if pp.size > 1 and self.device.type != "cpu":
            self._made = self._down = Group.create(
                pp.ranks, name=f"{pp.name}.down", backend="nccl", timeout=pp.timeout
            )
        self._sent: deque[Sending] = deque()

    def send(self, tensor: Tensor, stage: int) -> Sending:
        """Start sending `tensor` to `stage`; it may not change until it has left."""
        if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
            raise ValueError(
                f"a tensor of dtype {tensor.dtype} and {tensor.dim()} dimensions cannot pass "
                f"between stages: at most {_MAX_DIMS} dimensions of one of "
                f"{', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}"
            )
        sizes = list(tensor.shape) + [0] * (_MAX_DIMS - tensor.dim())
        tensors = [torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *sizes])]
        header = self._send(tensors[0], stage, self._headers)
        payload = None
        if tensor.numel():
            tensors.append(tensor.detach().contiguous())
            payload = self._send(tensors[1], stage, self._link(self.group.rank, stage))
        while self._sent and self._sent[0].is_done:
            self._sent.popleft()
        self._sent.append(Sending(header, payload, tensors))
        return self._sent[-1]

    def receive(self, stage: int) -> Message:
        """Wait for the header of the next message from `stage`, start receiving, return it.

        It waits as long as it takes. One thread at a time receives from a stage.
        """
        header = torch.empty(_HEADER, dtype=torch.int64)
        work = self._receive(header, stage, self._headers)
        work.wait(_LONG)
        dtype, dims, *sizes = header.tolist()
        out = torch.empty(sizes[:dims], dtype=_DTYPES[dtype], device=self.device)
        if not out.numel():
            return Message(out, None)
        return Message(out, self._receive(out, stage, self._link(stage, self.group.rank)))

    def flush(self) -> None:
        """Return when everything sent has left."""
        while self._sent:
            self._sent.popleft().wait()

    def abandon(self) -> None:
        """Break the connections: after a fault, so that no stage and no thread waits for ever.

        The group cannot carry messages any more.
        """
        if self.group.size > 1:
            _torch.break_connections(self._headers.process_group)

    def close(self) -> None:
        """Destroy the process group that this channel made; all stages call it together."""
        if self._made is not None:
            self._made.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:  # after a fault the others may never come to close with us
            self.close()

    # Not `send_to` and `receive_into`: the stages' own reports say who is at the root of a fault.
    def _send(self, x: Tensor, stage: int, group: Group) -> Any:
        return _torch.send(x, group.ranks[stage], group.process_group)

    def _receive(self, out: Tensor, stage: int, group: Group) -> Any:
        return _torch.receive(out, group.ranks[stage], group.process_group)

    def _link(self, source: int, target: int) -> Group:
        return self._up if source < target else self._down
