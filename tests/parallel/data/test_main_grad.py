"""Whether a forward pass may keep hold of the buffer to which its backward pass will add."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelConfig, ParallelMesh, param_specs
from mcore_parallel.config import SHARDINGS
from mcore_parallel.data import GradientBuckets
from mcore_parallel.data.main_grad import has_lasting_main_grad
from mcore_parallel.tensor import VocabParallelHead


class _Weighed(torch.autograd.Function):
    """Σ of all logits; the gradient of the weight goes to the buffer that the forward was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.out = out
        return (x @ weight.t()).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        found = grad * x.sum(0).expand_as(weight)
        if ctx.out is None:
            return grad * weight.sum(0).expand_as(x), found, None
        ctx.out.add_(found)
        return grad * weight.sum(0).expand_as(x), None, None


def use(x: Tensor, weight: Tensor, bias: Tensor | None, weight_grad_out: Tensor | None) -> Tensor:
    found: Tensor = _Weighed.apply(x, weight, weight_grad_out)  # type: ignore[no-untyped-call]
    return found


class Depths(nn.Module):
    """A head that each of two depths uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head = VocabParallelHead(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x, use=use) + 3 * self.head(2 * x, use=use)
        return found


def buckets_of(model: nn.Module, sharding: Any) -> GradientBuckets:
    mesh = ParallelMesh.create(ParallelConfig(sharding=sharding))
    assert mesh is not None
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    return GradientBuckets(dict(model.named_parameters()), specs, mesh)


@pytest.mark.parametrize("sharding", SHARDINGS[:3])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_forward_passes_in_flight_lose_no_gradient(sharding: str, in_flight: int) -> None:
    """Under zero=2 a reduction takes the buffer of passes that have not gone backward yet."""
    model = Depths()
    buckets = buckets_of(model, sharding)
    assert has_lasting_main_grad(model.head.weight) == (sharding != "gradients")  # type: ignore[arg-type]
    batches = [torch.full((2, 4), 10.0**n) for n in range(2 * in_flight)]
    for start in (0, in_flight):
        losses = [model(x) for x in batches[start : start + in_flight]]
        for number, loss in enumerate(losses, start + 1):
            last = number == len(batches)
            with nullcontext() if last else buckets.no_sync():
                loss.backward()
    buckets.finish()
    found = buckets.gradients()["grad/head.weight"].tensor
    assert (found == sum(2 * 7 * 10.0**n for n in range(2 * in_flight))).all()


def test_what_is_asked_of_a_parameter_without_a_bucket() -> None:
    weight = nn.Parameter(torch.zeros(2))
    assert not has_lasting_main_grad(weight)
    weight.main_grad = None  # type: ignore[attr-defined]
    assert not has_lasting_main_grad(weight)
    weight.main_grad = torch.zeros(2)  # type: ignore[attr-defined]
    assert has_lasting_main_grad(weight)
