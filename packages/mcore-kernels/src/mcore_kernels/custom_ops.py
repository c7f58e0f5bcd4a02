"""Making a kernel an operator of torch, and launching it; imports no kernel language.

`torch.library.custom_op` would do the same, but its first call imports torch's compiler: seconds
at the start of every process, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class OpLibrary:
    """Operators `torch.ops.mcore_kernels.*`; keep it at module level, it owns what it defines."""

    def __init__(self) -> None:
        self._library = torch.library.Library("mcore_kernels", "FRAGMENT")  # type: ignore[no-untyped-call]

    def define(
        self, schema: str, kernel: Callable[..., Any], *, fake: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Define an operator that returns fresh tensors, and changes only what its schema says.

        Args:
            schema: "name(Tensor x, float eps) -> Tensor"; an argument "Tensor(a!) x" is changed.
            kernel: computes it on every device.
            fake: returns empty results of the right shape, dtype and device; for torch.compile.
        """
        name = schema.partition("(")[0]
        self._library.define(schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
        self._library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"mcore_kernels::{name}", fake, lib=self._library)
        return getattr(torch.ops.mcore_kernels, name).default  # type: ignore[no-any-return]

    def when_compiled(
        self, schema: str, kernel: Callable[..., Any], *, fake: Callable[..., Any]
    ) -> Callable[..., Any]:
        """As `define`, but `kernel` itself is called where nothing is being compiled.

        For what torch.compile cannot trace (launches, values read back) and what eager code calls
        so often that torch's dispatch, some ten microseconds, would be felt. It records no
        gradient. Arguments are given by position.
        """
        operator = self.define(schema, kernel, fake=fake)

        def call(*arguments: Any) -> Any:
            return operator(*arguments) if torch.compiler.is_compiling() else kernel(*arguments)

        return call

    def differentiate(
        self,
        name: str,
        backward: Callable[..., Any],
        *,
        keep: Callable[..., None],
        twice: bool = False,
    ) -> None:
        """Give the operator a gradient: `keep(ctx, inputs, output)`, `backward(ctx, *grads)`.

        Unless `backward` can be differentiated itself (`twice`), who asks for that gets an error.
        """
        if not twice:
            backward = torch.autograd.function.once_differentiable(backward)
        torch.library.register_autograd(
            f"mcore_kernels::{name}", backward, setup_context=keep, lib=self._library
        )


def rows(x: Tensor) -> Tensor:
    """x […, H] as [N, H] with neighbouring columns; copied only where it does not lie so."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of `x` the current one, where kernels are launched; nothing on CPU."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def interpreted(x: Tensor) -> bool:
    """Whether a kernel on `x` runs in Triton's interpreter.

    It multiplies matrices of bfloat16 as the integers that their bits are, so kernels widen them.
    """
    return not x.is_cuda


def programs(x: Tensor, *, per_processor: int) -> int:
    """How many programs to start that each walk over many rows: a few per processor of the GPU."""
    if not x.is_cuda:
        return per_processor
    return per_processor * torch.cuda.get_device_properties(x.device).multi_processor_count
