"""`Kernels`: all operators resolved together."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

from mcore_kernels import (
    OPERATORS,
    Assignment,
    KernelConfig,
    Kernels,
    RoutingRule,
    Target,
    VocabShard,
    resolve,
    rope_cos_sin,
    sinkhorn,
    vocab_loss,
)


def test_choices_and_digest() -> None:
    kernels = Kernels(KernelConfig(attention="reference"), Target())
    assert list(kernels.choices()) == list(OPERATORS)
    assert kernels.choices()["attention"] == "reference"
    assert kernels.choices()["rms_norm"] == "eager"
    assert kernels.digest() == Kernels(KernelConfig(attention="reference")).digest()
    assert kernels.digest() != Kernels().digest()
    assert Kernels(KernelConfig(attention="sdpa")).digest() == Kernels().digest()


def test_it_prints_as_what_it_is() -> None:
    assert repr(Kernels()) == (
        "Kernels(cpu float32: linear=reference, rms_norm=eager, add_rms_norm=eager, "
        "layer_norm=reference, l2_norm=reference, swiglu=reference, glu=reference, "
        "gelu=reference, activation=reference, rope=reference, attention=sdpa, "
        "paged_attention=reference, "
        "cross_entropy=eager, moe_route=reference, moe_permute=reference, "
        "grouped_linear=reference, causal_conv1d=reference, ssd_scan=chunked, "
        "gated_delta_rule=chunked, quantize=reference, fp8_matmul=reference, "
        "fp8_grouped=reference, adam=reference, "
        "grad_stats=reference, sample=reference)"
    )


def test_a_choice_that_cannot_run_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="swiglu: 'triton' cannot run on cpu float32: needs a CUDA"
    ):
        Kernels(KernelConfig(swiglu="triton"), Target())


def test_a_model_for_another_device_is_resolved_without_it() -> None:
    target = Target(device_type="cuda", arch=(9, 0), dtype=torch.bfloat16, head_dim=64)
    # Triton is not imported here.
    in_triton = [op for op, operator in OPERATORS.items() if operator.get("triton") is not None]
    config = KernelConfig(**dict.fromkeys(in_triton, "reference"))
    assert Kernels(config, target).choices()["attention"] == "cudnn"


def test_copies_are_equal_and_work() -> None:
    kernels = Kernels()
    for one in (copy.deepcopy(kernels), pickle.loads(pickle.dumps(kernels))):
        assert one == kernels
        assert one.choices() == kernels.choices()
        x, weight = torch.randn(3, 8), torch.randn(8)
        assert torch.equal(one.rms_norm(x, weight, 1e-5), kernels.rms_norm(x, weight, 1e-5))


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Kernels().linear = None  # type: ignore[misc, assignment]


class Layer(nn.Module):
    """Every operator once; keeps its kernels, as modules do."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.qkv = nn.Parameter(torch.linspace(-0.3, 0.3, 48 * 16).view(48, 16))
        self.up = nn.Parameter(torch.linspace(0.3, -0.3, 32 * 16).view(32, 16))
        self.taps = nn.Parameter(torch.linspace(-0.5, 0.5, 32 * 4).view(32, 4))
        self.decay = nn.Parameter(torch.linspace(0.0, 1.0, 2))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        kernels = self.kernels
        qkv = kernels.linear(kernels.rms_norm(x, self.norm, 1e-5), self.qkv)
        q, k, v = qkv.view(-1, 3, 2, 8).unbind(1)
        cos, sin = rope_cos_sin(torch.arange(6).repeat(2), 8)
        q, k = kernels.rope(q, k, cos, sin)
        out, _ = kernels.attention(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=6,
            max_seqlen_k=6,
            uniform=(2, 6),
        )
        x = kernels.layer_norm(x + out.flatten(1), self.norm, None, 1e-5)
        packed = {"cu_seqlens": cu_seqlens, "uniform": (2, 6)}
        mixed, _ = kernels.causal_conv1d(kernels.linear(x, self.up), self.taps, silu=True, **packed)
        value, key, query = mixed.view(-1, 4, 8).split([2, 1, 1], 1)
        scanned, _ = kernels.ssd_scan(
            value, mixed[:, :2], self.decay, key, query, max_seqlen=6, chunk_size=4, **packed
        )
        gate = mixed[:, :2].sigmoid()
        written, _ = kernels.gated_delta_rule(
            query, key, scanned, -gate, gate, max_seqlen=6, chunk_size=4, **packed
        )
        return kernels.gelu(kernels.swiglu(kernels.linear(written.flatten(1), self.up)))


# torch's tracer makes an instance of every autograd function, against its own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_a_module_compiles_in_one_graph() -> None:
    layer = Layer(Kernels())
    x, cu_seqlens = torch.randn(12, 16), torch.tensor([0, 6, 12], dtype=torch.int32)
    layer(x, cu_seqlens).square().sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x, cu_seqlens).square().sum().backward()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_experts_and_losses_compile_in_one_graph() -> None:
    kernels, rule = Kernels(), RoutingRule(top_k=2, score="sigmoid", normalise=True)
    up, down = torch.linspace(-1, 1, 4 * 12 * 8).view(4, 12, 8), torch.ones(4, 8, 6)
    ends = torch.tensor([0, 5], dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 5, "max_seqlen_k": 5}

    def network(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        normed, total = kernels.add_rms_norm(x, x, head[0], 1e-5, zero_centered=True)
        q = kernels.l2_norm(normed.view(5, 2, 4), 1e-6)
        mixed, _ = kernels.attention(q, 2.0 * q, -q, **lengths, uniform=(1, 5), sinks=head[0, :2])
        hidden = mixed.flatten(1) + total
        weights, experts, _ = kernels.moe_route(hidden[:, :4], rule=rule)
        assignment = Assignment.of(experts, 4)
        rows = kernels.moe_permute.permute(hidden, assignment)
        rows = kernels.glu(kernels.grouped_linear(rows, up, assignment.counts), limit=2.0)
        rows = kernels.activation(kernels.grouped_linear(rows, down, assignment.counts))
        hidden = kernels.moe_permute.unpermute(rows, weights, assignment)
        loss = vocab_loss(
            hidden @ head.t(),
            torch.arange(5),
            op=kernels.cross_entropy,
            shard=VocabShard(vocab_size=9),
        )
        return loss.loss.sum()

    x, head = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    expected = torch.autograd.grad(network(x, head), (x, head))
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    for one, other in zip(torch.autograd.grad(compiled(x, head), (x, head)), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["sdpa", "reference", "flex", "invariant"])
def test_what_reads_lengths_back_compiles_in_one_graph(name: str) -> None:
    """Packed documents and pages, of which a graph knows no length, and a loop with an end."""
    attend = resolve("attention", target=Target(), require=name)
    paged = resolve("paged_attention", target=Target())
    ends = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 7, "max_seqlen_k": 7}
    pages = {
        "block_table": torch.tensor([[0], [1], [2]], dtype=torch.int32),
        "context_lengths": torch.tensor([4, 2, 7], dtype=torch.int32),
        "cu_seqlens_q": ends,
        "max_seqlen_q": 7,
    }

    def network(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = attend(q, k, 2.0 * k, **lengths, window=4, softcap=3.0)
        cache = torch.arange(168.0).view(3, 7, 2, 4).sin()
        served, _ = paged(out.detach(), cache, cache, **pages)
        return out, lse, served, sinkhorn(q.detach().flatten(1))

    q, k = (torch.randn(10, heads, 4, requires_grad=True) for heads in (4, 2))
    results = []
    for run in (network, torch.compile(network, backend="aot_eager", fullgraph=True)):
        found = run(q, k)
        assert [one.requires_grad for one in found] == [True, False, False, False]
        results.append([*found, *torch.autograd.grad(found[0].square().sum(), (q, k))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_module_is_copied_with_its_kernels() -> None:
    layer = Layer(Kernels())
    twin = copy.deepcopy(layer)
    x, cu_seqlens = torch.randn(12, 16), torch.tensor([0, 6, 12], dtype=torch.int32)
    assert torch.equal(twin(x, cu_seqlens), layer(x, cu_seqlens))
    assert twin.norm is not layer.norm


def test_operators_run_on_meta() -> None:
    with torch.device("meta"):
        layer = Layer(Kernels()).to("meta")
        kernels = layer.kernels
        x = torch.empty(12, 16)
        assert kernels.swiglu(kernels.rms_norm(x, layer.norm, 1e-5)).shape == (12, 8)
