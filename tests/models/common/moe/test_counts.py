"""Where experts are whole on one rank: no count comes to the host, and nothing else differs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_kernels import KernelConfig, Kernels, Target
from mcore_kernels.ops.grouped_linear.fp8 import Fp8GroupedLinear
from mcore_kernels.quant import Fp8Recipe
from mcore_models import AuxiliaryLosses, BuildContext, GlobalCounts, ModelConfig, TokenContext
from mcore_models.common import MoE
from mcore_models.common.moe import auxiliary_names
from mcore_models.common.moe.experts import padded_experts
from mcore_parallel import ParallelMesh, RngKey
from mcore_parallel.expert import AllGather, AllToAll, TorchPermute, finish
from mcore_parallel.expert.local import Local
from mcore_parallel.recompute import recompute

sys.path.append(str(Path(__file__).parent))
from moe_layers import CONFIG, MOE, E, H, batch_of, changed, context_of, make, random

CASES = {
    "gated": CONFIG,
    "biased": replace(changed(router_bias=True, expert_bias=True), activation="gelu"),
    "biased and gated": changed(expert_bias=True),
    "shared": changed(shared_ffn_size=12, shared_gate=True, jitter=0.1),
    "latent": changed(latent_size=6),
    "groups": changed(
        score_function="sigmoid", num_groups=2, top_groups=1, correction_rate=0.1,
        scaling_factor=2.5,
    ),
    "roots": changed(score_function="sqrt_softplus", z_loss_coefficient=0.01),
    "Sinkhorn": changed(expert_choice="sinkhorn", top_k=1, normalise_top_k=False),
    "in turn": changed(expert_choice="balanced"),
    "many": changed(num_experts=16, aux_loss_scope="global"),
}  # fmt: skip


def results(layer: MoE, tokens: int, run: Callable[..., Any] | None = None) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    mask = torch.ones(tokens)
    mask[1::4] = 0
    context = context_of(replace(CONFIG, moe=layer.config), batch_of(mask, [0, tokens]), 7.0)
    hidden = random(tokens, H).to(layer.experts.down.weight.dtype).requires_grad_()
    out = layer(hidden, context) if run is None else run(layer, hidden, context)
    out.backward(random(tokens, H, seed=1).to(out.dtype))
    given = [hidden, *(p for p in layer.parameters() if p.requires_grad)]
    return [out.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in given)]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tokens", [0, 1, 19])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_counts_that_are_read(name: str, tokens: int) -> None:
    layer = make(CASES[name])
    assert isinstance(layer._dispatch, Local)
    found = results(layer, tokens)
    assert same(found, results(make(CASES[name], dispatcher=AllToAll), tokens))
    assert tokens == 0 or all(part.any() for part in found[:2])


def test_recomputed_and_in_steps() -> None:
    def again(layer: MoE, hidden: Tensor, context: TokenContext) -> Tensor:
        return recompute(lambda x: layer(x, context), hidden)

    def in_steps(layer: MoE, hidden: Tensor, context: TokenContext) -> Tensor:
        out: Tensor = finish(layer(hidden, replace(context, in_turns=True)))
        return out

    wanted = results(make(CONFIG), 19)
    assert same(results(make(CONFIG), 19, again), wanted)
    assert same(results(make(CONFIG), 19, in_steps), wanted)


@pytest.mark.parametrize("scaling", ["tensor", "block", "row"])
def test_numbers_of_8_bits(scaling: Any) -> None:
    def layer(**options: Any) -> MoE:
        layer = make(changed(expert_bias=True), **options).float()
        for one in (layer.experts.get_submodule("gate_up"), layer.experts.down):
            one.linear = Fp8GroupedLinear(Fp8Recipe(scaling=scaling), E, emulate=True)
        return layer

    assert same(results(layer(), 19), results(layer(dispatcher=AllToAll), 19))


def test_who_may_drop_reads() -> None:
    assert isinstance(make(changed(capacity_factor=1.0))._dispatch, AllToAll)
    assert isinstance(make(CONFIG, dispatcher=AllGather)._dispatch, AllGather)


def test_padded_experts_take_both_kinds() -> None:
    class Twice(nn.Module):
        def forward(self, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
            assert counts == (4, 4, 4)
            return 2 * rows

    rows, counts = random(7, H), [3, 0, 4]
    found = [
        padded_experts(Twice(), rows, given, 4, TorchPermute())
        for given in (counts, torch.tensor(counts))
    ]
    assert torch.equal(found[0], 2 * rows)
    assert torch.equal(found[1], 2 * rows)


# --- nothing is read ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shapes:
    """A grouped linear operator that knows shapes alone."""

    def forward(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        assert counts.shape == weight.shape[:1]
        return x.new_empty(len(x), weight.shape[1])

    def input_grad(self, dy: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        assert counts.shape == weight.shape[:1]
        return dy.new_empty(len(dy), weight.shape[2])

    def weight_grad(self, dy: Tensor, x: Tensor, counts: Tensor, out: Tensor) -> None:
        assert (*counts.shape, dy.shape[1], x.shape[1]) == out.shape


class EncodedShapes(Shapes):
    """One whose factors have a form of their own."""

    def encode(
        self, role: str, x: Tensor, counts: Tensor | None, **_: bool
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        return (x,), (x,)

    def output(self, x: Any, weight: Any, counts: Tensor, dtype: torch.dtype) -> Tensor:
        return self.forward(*x, *weight, counts)

    def input_gradient(self, dy: Any, weight: Any, counts: Tensor, dtype: torch.dtype) -> Tensor:
        return self.input_grad(*dy, *weight, counts)

    def weight_gradient(self, dy: Any, x: Any, counts: Tensor, out: Tensor) -> None:
        self.weight_grad(*dy, *x, counts, out)


def without_data(config: ModelConfig, op: Shapes, **options: Any) -> MoE:
    """A layer on the device "meta": who reads a tensor there fails."""
    layer = make(config, **options).to("meta")
    for one in layer.experts.children():
        if hasattr(one, "linear"):
            one.linear = op
    return layer


def trained(layer: MoE, config: ModelConfig) -> list[Tensor]:
    """The gradients of a pass that is recomputed."""
    batch = batch_of(torch.ones(19), [0, 19]).to("meta")
    auxiliary = AuxiliaryLosses(GlobalCounts(tokens=7.0), auxiliary_names(config.moe))
    context = TokenContext(batch=batch, auxiliary=auxiliary, rng=RngKey(9))
    hidden = random(19, H).to("meta").requires_grad_()
    out = recompute(lambda x: layer(x, context), hidden)
    out.backward(torch.empty_like(out))
    return [p.grad for p in (hidden, *layer.parameters()) if p.grad is not None]


@pytest.mark.parametrize("op", [Shapes(), EncodedShapes()])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_on_the_host(name: str, op: Shapes) -> None:
    layer = without_data(CASES[name], op)
    assert len(trained(layer, CASES[name])) >= 4
    with torch.inference_mode():
        batch = batch_of(torch.ones(3), [0, 3]).to("meta")
        out = layer.eval()(random(3, H).to("meta"), TokenContext(batch=batch))
    assert out.shape == (3, H)


@pytest.mark.parametrize("dispatcher", [AllToAll, AllGather])
def test_what_is_read_would_be_found(dispatcher: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        trained(without_data(CONFIG, Shapes(), dispatcher=dispatcher), CONFIG)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU fails within the block."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bias", [False, True])
def test_the_host_does_not_wait_for_the_gpu(bias: bool) -> None:
    moe = replace(MOE, num_experts=16, top_k=4, expert_ffn_size=256, expert_bias=bias)
    config = replace(CONFIG, hidden_size=256, moe=moe)
    kernels = Kernels(KernelConfig(), Target.of("cuda", dtype=torch.bfloat16))
    mesh = ParallelMesh.single()
    build = BuildContext(
        mesh=mesh, kernels=kernels, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    layers = [MoE(config, build, 0), MoE(config, build, 0, dispatcher=AllToAll)]
    for parameter in layers[0].parameters():
        nn.init.normal_(parameter, std=0.1)
    layers[1].load_state_dict(layers[0].state_dict())
    batch = batch_of(torch.ones(512), [0, 512]).to("cuda")
    x = random(512, 256).to("cuda", torch.bfloat16)

    def run(layer: MoE) -> list[Tensor]:
        auxiliary = AuxiliaryLosses(GlobalCounts(tokens=7.0), auxiliary_names(moe))
        context = TokenContext(batch=batch, auxiliary=auxiliary, rng=RngKey(9))
        hidden = x.clone().requires_grad_()
        out = recompute(lambda x: layer(x, context), hidden)
        out.backward(x)
        gradients = [p.grad for p in (hidden, *layer.parameters()) if p.grad is not None]
        layer.zero_grad()
        return [out.detach(), *gradients]

    wanted = run(layers[1])
    run(layers[0])  # kernels are compiled
    with no_waiting():
        found = run(layers[0])
    assert same(found, wanted)
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        run(layers[1])
