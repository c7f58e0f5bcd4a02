"""Activations that the backward pass computes again instead of keeping them.

`torch.utils.checkpoint` does the same for whole functions; it loads torch's compiler (and with it
Triton) when it is first called, seconds in every process, and cannot cut its inputs over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcore_parallel.collectives import all_gather
from mcore_parallel.group import Group

__all__ = ["recompute", "recompute_output"]

T = TypeVar("T")


def recompute(fn: Callable[..., T], *inputs: Tensor, spread: Group | None = None) -> T:
    """Return `fn(*inputs)`, of which the backward pass runs `fn` again instead of keeping tensors.

    Only `inputs` are kept, and whatever `fn` holds itself. With `spread`, over whose ranks the
    inputs are equal, each rank keeps an equal share of them, and the backward pass all-gathers
    them over it. Results and gradients are those of the plain call, bit for bit: torch's random
    generators (of the CPU and of the inputs' device) and autocast are set as they were. `fn` must
    do the same again, collectives included, in which all ranks take part alike; its second run
    ends with the last tensor that the backward pass needs. Calls may be nested, and may be inside
    of other hooks for saved tensors, which then see the inputs. Without grad mode this is the plain
    call.

    Raises:
        RuntimeError: in the backward pass: the second run keeps other tensors than the first, or
            the gradient itself is to be differentiated (`create_graph=True`).
    """
    if not torch.is_grad_enabled():
        return fn(*inputs)
    frame = _Frame(fn, _Kept(inputs, spread), _Surroundings(inputs))
    with saved_tensors_hooks(frame.pack, frame.unpack):
        return fn(*inputs)


def recompute_output(make: Callable[[Tensor], Tensor], x: Tensor, use: Callable[[Tensor], T]) -> T:
    """Return `use(make(x))`; what `use` saves of its input, the backward pass makes again.

    For a cheap `make` (a norm, an activation) whose input is kept in any case and whose output is
    kept because the operator after it needs it. `make` must be a function of `x` and of values that
    do not change before the backward pass; autocast is set as it was. What `use` saves after it has
    changed its input in place is kept. The gradient is that of the plain call, bit for bit. Without
    grad mode this is the plain call.
    """
    made = make(x)
    if not torch.is_grad_enabled():
        return use(made)
    cell = _Cell(make, _Kept((x,)), Autocast({x.device.type}))
    place = made.untyped_storage().data_ptr(), made.dtype, int(made.storage_offset())
    version = made._version

    def pack(tensor: Tensor) -> Tensor | _View:
        data, dtype, start = place
        is_other = (tensor.untyped_storage().data_ptr(), tensor.dtype) != (data, dtype)
        if is_other or tensor._version != version:
            return tensor
        cell.wanted += 1
        return _View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) - start)

    def unpack(packed: Tensor | _View) -> Tensor:
        return packed if isinstance(packed, Tensor) else cell.view(packed)

    with saved_tensors_hooks(pack, unpack):
        return use(made)


class _Frame:
    """One call: what it kept, and what it made again.

    Autograd holds the number of each tensor that the call would have kept, and this object through
    its method `unpack`; both go with the graph.
    """

    def __init__(
        self, fn: Callable[..., object], inputs: _Kept, surroundings: _Surroundings
    ) -> None:
        self._fn, self._inputs, self._surroundings = fn, inputs, surroundings
        self._shapes: list[tuple[int, ...]] = []
        self._again: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        self._shapes.append(tuple(tensor.shape))
        return len(self._shapes) - 1

    def unpack(self, number: int) -> Tensor:
        _refuse_graph()
        if number not in self._again:
            self._run_again()
        return self._again.pop(number)

    def _run_again(self) -> None:
        count = 0

        def pack(tensor: Tensor) -> None:
            nonlocal count
            if tuple(tensor.shape) != self._shapes[count]:
                raise RuntimeError(
                    f"run again, tensor {count} that is kept has shape {list(tensor.shape)} and "
                    f"not {list(self._shapes[count])}: the function does not do the same twice"
                )
            self._again[count] = tensor.detach()
            count += 1
            if count == len(self._shapes):
                raise _EnoughError

        inputs = self._inputs.get()
        try:
            with (
                self._surroundings.again(),
                torch.enable_grad(),
                saved_tensors_hooks(pack, _never_unpacked),
            ):
                self._fn(*inputs)
        except _EnoughError:
            return
        raise RuntimeError(
            f"run again, the function keeps {count} tensors and not {len(self._shapes)}: it does "
            f"not do the same twice"
        )


def _refuse_graph() -> None:
    """What is made again has no graph, so that a derivative of the gradient would lack a part."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "recomputed activations in a backward pass with create_graph=True: its result could "
            "not be differentiated; call the function without recompute"
        )


class _EnoughError(BaseException):
    """All that the backward pass needs is there; no handler of errors is to stop it."""


def _never_unpacked(packed: object) -> Tensor:
    raise AssertionError("the second run has no backward pass")


class _Kept:
    """Tensors as autograd saves them: freed with the graph, seen by the hooks around the call."""

    def __init__(self, tensors: tuple[Tensor, ...], spread: Group | None = None) -> None:
        self._needed = tuple(x.requires_grad for x in tensors)
        with ExitStack() as stack:
            if spread is not None and spread.size > 1:
                stack.enter_context(_spread_over(spread))
            # The first argument lets the result have a node, whatever the tensors are.
            # It is the result that holds the node: up to torch 2.11 its `grad_fn` alone does not.
            self._result = _Keep.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]

    def get(self) -> list[Tensor]:
        """Return the tensors, without the graph they came from."""
        saved = cast(tuple[Tensor, ...], self._result.grad_fn.saved_tensors)
        pairs = zip(saved, self._needed, strict=True)
        return [tensor.detach().requires_grad_(needed) for tensor, needed in pairs]


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return root.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("nothing is computed from its result")


def _spread_over(group: Group) -> saved_tensors_hooks:
    """Hooks that keep an equal share of a tensor on each rank; the last ranks' are padded."""

    def pack(tensor: Tensor) -> tuple[Tensor, torch.Size]:
        flat = tensor.detach().reshape(-1)
        size = -(-flat.numel() // group.size)
        mine = flat[size * group.rank :][:size]
        # A copy in any case: a view would keep the whole.
        return F.pad(mine, (0, size - mine.numel())).clone(), tensor.shape

    def unpack(packed: tuple[Tensor, torch.Size]) -> Tensor:
        mine, shape = packed
        return all_gather(mine, group)[: shape.numel()].view(shape)

    return saved_tensors_hooks(pack, unpack)


class _Surroundings:
    """Random generators and autocast, as they are now."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self._devices = {x.device for x in inputs if x.device.type == "cuda"}
        self._cpu = torch.get_rng_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in self._devices}
        self._autocast = Autocast({device.type for device in self._devices})

    @contextmanager
    def again(self) -> Iterator[None]:
        """Make them within the block what they were."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self._devices, device_type="cuda"))
            torch.set_rng_state(self._cpu)
            for device, state in self._cuda.items():
                torch.cuda.set_rng_state(state, device)
            stack.enter_context(self._autocast.again())
            yield


class Autocast:
    """Autocast of the CPU and of other kinds of devices, as it is now."""

    def __init__(self, kinds: set[str]) -> None:
        self._states = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu"} | kinds)
        ]

    def again(self) -> ExitStack:
        """Return a context within which it is what it was."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._states:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            return stack.pop_all()


@dataclass(frozen=True)
class _View:
    """Where a tensor lies in the output that is made again."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


class _Cell:
    """The output of `make`, made again when the first of its views is wanted."""

    def __init__(self, make: Callable[[Tensor], Tensor], kept: _Kept, autocast: Autocast) -> None:
        self._make, self._kept, self._autocast = make, kept, autocast
        self._value: Tensor | None = None
        self.wanted = 0  # views that were kept and not asked for yet

    def view(self, view: _View) -> Tensor:
        """Return a view of the value, which goes with the last of them."""
        _refuse_graph()
        if self._value is None:
            with torch.no_grad(), self._autocast.again():
                self._value = self._make(*self._kept.get())
        value = self._value
        self.wanted -= 1
        if self.wanted <= 0:
            self._value = None
        return value.as_strided(view.shape, view.strides, value.storage_offset() + view.start)
