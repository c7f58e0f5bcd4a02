"""Messages between pipeline stages: tensors of any shape and dtype, asynchronous both ways."""

from __future__ import annotations

from collections import deque
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel.collectives import Work, receive_into, send_to
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


class Message:
    """A tensor on its way here."""

    def __init__(self, tensor: Tensor, work: Work | None) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> Tensor:
        """Return the tensor once it may be used."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._tensor


class Sending:
    """A tensor on its way out, kept alive until it has left."""

    def __init__(self, parts: list[tuple[Work, Tensor]]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Return once it has left, and let go of it."""
        for work, _ in self._parts:
            work.wait()
        self._parts = []

    @property
    def is_done(self) -> bool:
        """Whether it has left. gloo does not know before it is asked to wait."""
        return all(isinstance(work, dist.Work) and work.is_completed() for work, _ in self._parts)


class Channel:
    """Point-to-point messages among the stages of `pp`, in order between any two of them.

    Each tensor follows a small header with its shape and dtype, so that lengths may vary from one
    micro-batch to the next and nobody has to agree on them beforehand. Headers travel over the
    group's CPU twin: waiting for one never waits for a device.

    With NCCL a send occupies its communicator until the other side receives, and a pair of ranks
    shares one for both directions: two stages that send each other activations and gradients would
    block each other. So messages to a higher rank and to a lower one use two process groups. The
    second one is made here, by all stages together; `close()` destroys it.

    device: where tensors come from and go to, `mesh.device`.
    """

    def __init__(self, pp: Group, *, device: torch.device | str = "cpu") -> None:
        self.group = pp
        self.device = torch.device(device)
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
        header = torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *sizes])
        parts = [(send_to(header, stage, self._headers), header)]
        if tensor.numel():
            payload = tensor.detach().contiguous()
            parts.append((send_to(payload, stage, self._link(self.group.rank, stage)), payload))
        while self._sent and self._sent[0].is_done:
            self._sent.popleft()
        self._sent.append(Sending(parts))
        return self._sent[-1]

    def receive(self, stage: int) -> Message:
        """Wait for the header of the next message from `stage`, start receiving, return it."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        receive_into(header, stage, self._headers).wait()
        dtype, dims, *sizes = header.tolist()
        out = torch.empty(sizes[:dims], dtype=_DTYPES[dtype], device=self.device)
        if not out.numel():
            return Message(out, None)
        return Message(out, receive_into(out, stage, self._link(stage, self.group.rank)))

    def flush(self) -> None:
        """Return when everything sent has left."""
        while self._sent:
            self._sent.popleft().wait()

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

    def _link(self, source: int, target: int) -> Group:
        return self._up if source < target else self._down
