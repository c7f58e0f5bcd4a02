"""The gated delta net: alone and packed, cut over ranks, token by token."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_models import (
    GPT,
    DeltaNetConfig,
    GlobalCounts,
    MambaConfig,
    ModelConfig,
    TokenBatch,
    TokenContext,
    build_model,
    check_layout,
    count_parameters,
    flops_per_token,
    llama,
)
from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.tensor import gather_logits
from mcore_parallel.testing import RankPool

DELTA = DeltaNetConfig(
    num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=8, chunk_size=4
)
PURE = ModelConfig(vocab_size=37, hidden_size=32, num_layers=2, delta_net=DELTA, init_std=0.2)
HYBRID = replace(
    llama(vocab_size=37, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, init_std=0.2),
    pattern=("G-", "*M", "G."),
    delta_net=DELTA,
    mamba=MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2, chunk_size=4),
)
MODELS = pytest.mark.parametrize("config", [PURE, HYBRID], ids=["pure", "hybrid"])


def tokens_like(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(seed))


def global_tensors(model: GPT) -> dict[str, Tensor]:
    specs = model.specs()
    return {
        fragment.name: view
        for name, parameter in model.named_parameters()
        for fragment, view in specs[name].layout.views(parameter)
    }


# --- what it computes ---------------------------------------------------------------------------


def test_a_layer_by_hand() -> None:
    """Token after token, head after head, from the formulas of the paper (in float64)."""
    config = replace(PURE, num_layers=1)
    layer = build_model(config, dtype=torch.float64).get_submodule("layers.0.delta_net")
    weights = {
        name.removeprefix("layers.0.delta_net."): value
        for name, value in global_tensors(build_model(config, dtype=torch.float64)).items()
    }
    hidden = torch.randn(7, 32, dtype=torch.float64)
    batch = TokenBatch.from_samples(torch.zeros(1, 7, dtype=torch.int64))

    def convolved(name: str) -> Tensor:
        rows = torch.cat((torch.zeros(3, 32, dtype=torch.float64), hidden))
        rows = rows @ weights[f"{name}.weight"].T
        taps = weights[f"{name}_conv.weight"]
        out = sum(rows[i : i + 7] * taps[:, i] for i in range(4))
        assert isinstance(out, Tensor)
        return out * out.sigmoid()

    q, k = (convolved(name).view(7, 2, 6) for name in "qk")
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v = convolved("v").view(7, 4, 8)
    z, alpha = hidden @ weights["z.weight"].T, hidden @ weights["alpha.weight"].T
    beta = (hidden @ weights["beta.weight"].T).sigmoid()
    kept = (-weights["a_log"].exp() * (1 + (alpha + weights["dt_bias"]).exp()).log()).exp()
    out = torch.zeros(7, 4, 8, dtype=torch.float64)
    for head in range(4):
        state = torch.zeros(6, 8, dtype=torch.float64)
        for t in range(7):
            key = k[t, head // 2]
            state = kept[t, head] * state
            state = state + torch.outer(key, beta[t, head] * (v[t, head] - key @ state))
            out[t, head] = q[t, head // 2] @ state / 6**0.5
    out = out / (out.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    out = out * weights["norm.weight"] * (z * z.sigmoid()).view(7, 4, 8)
    found = layer(hidden, TokenContext(batch=batch))
    torch.testing.assert_close(found, out.flatten(1) @ weights["out.weight"].T)


@MODELS
def test_it_is_causal_and_reaches_every_parameter(config: ModelConfig) -> None:
    model = build_model(config)
    tokens = tokens_like(1, 9)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 37
    one, other = model(tokens), model(changed)
    assert torch.equal(one[0, :5], other[0, :5])
    assert (one[0, 5:] - other[0, 5:]).abs().amax(-1).min() > 0
    batch = TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1))
    model.loss(batch, counts=GlobalCounts(tokens=9)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_what_is_recomputed_gives_the_same_gradients() -> None:
    tokens = tokens_like(2, 9)
    batch = TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1))
    found = []
    for parts in ((), ("delta_net", "norm")):
        recompute = RecomputeConfig(mode="selective", parts=parts) if parts else None
        model = build_model(HYBRID, recompute=recompute)
        model.loss(batch, counts=GlobalCounts(tokens=18)).backward()
        found.append({name: value.grad for name, value in model.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name  # type: ignore[arg-type]


# --- documents ----------------------------------------------------------------------------------


def local_logits(model: GPT, tokens: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [t, V] of this rank's share of documents packed into one row, by document."""
    mesh = model.mesh
    batch = TokenBatch.from_samples(tokens[None], cu_seqlens=torch.tensor(bounds))
    batch = batch.share(mesh.cp.rank, mesh.cp.size, multiple=mesh.tp.size)
    with torch.no_grad():
        logits = model.stage_forward(batch)
    logits = gather_logits(logits, mesh.tp, vocab_size=37)
    stop = int(batch.cu_seqlens[1])
    return logits[:stop], logits[stop : int(batch.cu_seqlens[-1])]


def isolated(config: ModelConfig, layout: str) -> None:
    """Changing document 1 changes no bit of document 2, which is as if it were alone."""
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.single() if layout == "tp=1" else ParallelMesh.create(parallel)
    assert mesh is not None
    model = build_model(config, mesh)
    tokens = tokens_like(12)  # 12 tokens: sequence parallelism cuts them
    # The bound falls into a chunk of four tokens, onto one, and makes documents of one token.
    for bound in (6, 4, 11, 1):
        first, second = local_logits(model, tokens, [0, bound, 12])
        changed = tokens.clone()
        changed[:bound] = (changed[:bound] + 3) % 37
        other, same = local_logits(model, changed, [0, bound, 12])
        assert torch.equal(same, second)
        assert not torch.equal(other, first)
        if not model.sequence_parallel:
            by_itself, _ = local_logits(model, tokens[bound:], [0, 12 - bound])
            torch.testing.assert_close(second, by_itself, rtol=1e-4, atol=1e-5)
    mesh.close()


@MODELS
def test_packed_documents_are_isolated_exactly(config: ModelConfig) -> None:
    """U41 in one process."""
    isolated(config, "tp=1")


@pytest.mark.parametrize("layout", ["tp=2,sp", "cp=2"])
def test_packed_documents_are_isolated_exactly_over_ranks(ranks: RankPool, layout: str) -> None:
    """U41 with heads cut over ranks, and with documents cut over ranks."""
    ranks.run(isolated, 2, HYBRID, layout)


# --- token by token -----------------------------------------------------------------------------


class StateCache:
    """Remembers what layers keep of the sequences of one batch; there is no attention."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[Tensor, ...]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        raise AssertionError(f"layer {layer} has no keys")

    def recall(self, layer: int) -> tuple[Tensor, ...] | None:
        return self.states.get(layer)

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        self.states[layer] = states


def test_decoding_through_a_cache_equals_the_whole_forward() -> None:
    model = build_model(PURE).eval()
    tokens = tokens_like(2, 11)
    cache, pieces = StateCache(), []
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 11)):
        positions = torch.arange(start, stop).expand(2, -1)
        batch = TokenBatch.from_samples(tokens[:, start:stop], positions=positions)
        pieces.append(model.stage_forward(batch, cache=cache).unflatten(0, (2, -1)))
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=1e-4, atol=1e-5)
    inputs, states = cache.states[0]
    assert inputs.shape == (2, 3, 2 * 2 * 6 + 4 * 8)
    assert (states.shape, states.dtype) == ((2, 4, 6, 8), torch.float32)


# --- parameters ---------------------------------------------------------------------------------


def test_names_shapes_and_counts() -> None:
    model = build_model(PURE)
    tensors = global_tensors(model)
    shapes = {
        name.removeprefix("layers.1.delta_net."): tuple(view.shape)
        for name, view in tensors.items()
        if name.startswith("layers.1.delta_net.")
    }
    assert shapes == {
        "q.weight": (12, 32),
        "k.weight": (12, 32),
        "v.weight": (32, 32),
        "z.weight": (32, 32),
        "beta.weight": (4, 32),
        "alpha.weight": (4, 32),
        "q_conv.weight": (12, 4),
        "k_conv.weight": (12, 4),
        "v_conv.weight": (32, 4),
        "a_log": (4,),
        "dt_bias": (4,),
        "norm.weight": (8,),
        "out.weight": (32, 32),
    }
    for config in (PURE, HYBRID):
        model = build_model(config, device="meta")
        sizes = sum(p.numel() for p in model.parameters())
        assert count_parameters(config).total == sizes
    assert flops_per_token(PURE, 8) == flops_per_token(PURE, 800)


def test_initial_values_and_what_must_stay_fp32() -> None:
    """Rates uniform up to 16, step sizes log-uniform in [0.001, 0.1], as published."""
    delta = replace(DELTA, num_key_heads=256, num_value_heads=512, key_head_dim=2, value_head_dim=2)
    model = build_model(replace(PURE, delta_net=delta), dtype=torch.bfloat16)
    found = global_tensors(model)
    rates, steps = found["layers.0.delta_net.a_log"], found["layers.0.delta_net.dt_bias"]
    assert rates.dtype == steps.dtype == torch.float32
    assert 0.01 <= rates.exp().min() < 0.5 < 15.8 < rates.exp().max() <= 16.00001
    steps = torch.nn.functional.softplus(steps)
    assert 0.001 * 0.999 <= steps.min() < 0.00105 < 0.095 < steps.max() <= 0.1 * 1.001
    assert 0.45 < found["layers.0.delta_net.k_conv.weight"].abs().max() <= 0.5
    assert torch.equal(found["layers.0.delta_net.norm.weight"], torch.ones(2))
    assert model(tokens_like(1, 6)).dtype == torch.bfloat16
    decaying = {name for name, spec in model.specs().items() if spec.decay}
    assert {n for n in decaying if n.startswith("layers.0.delta_net.")} == {
        f"layers.0.delta_net.{name}.weight" for name in ("in_proj", "conv", "out")
    }


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_heads": 3}, "num_value_heads=4 is not a multiple of num_key_heads=3: use .* 2"),
        ({"conv_width": 0}, "conv_width=0 must be a whole number of at least 1"),
        ({"dt_init_min": 0.5}, "dt_init_min=0.5 and dt_init_max=0.1 must rise"),
        ({"a_init_min": 0.0}, "a_init_min=0.0 and a_init_max=16.0 must rise from more than 0"),
    ],
)
def test_a_configuration_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(DELTA, **changes)  # type: ignore[arg-type]


def test_a_pattern_without_its_configuration() -> None:
    with pytest.raises(ValueError, match=r"layer 0 asks for 'G' and delta_net is not set"):
        replace(PURE, delta_net=None, num_heads=4, pattern=("G-", "*-"))
    both = replace(HYBRID, pattern=("G-", "*-", "MG"))
    with pytest.raises(ValueError, match="layer 2 is 'MG', and the states of both would be"):
        build_model(both)
    with pytest.raises(ValueError, match="delta_net is set and no layer of the pattern has 'G'"):
        replace(PURE, num_heads=4)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=3", "delta_net.num_value_heads=4 cannot be cut over tp=3: use tp=2 or 4"),
        ("tp=2,cp=4", r"the delta net's 2 value heads and 1 key heads \(of tp=2\)"),
    ],
)
def test_a_layout_that_cannot_be(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(replace(PURE, ffn_size=48), ParallelConfig.parse(layout))
    check_layout(PURE, ParallelConfig.parse("tp=4"))
    check_layout(PURE, ParallelConfig.parse("tp=2,cp=2"))
