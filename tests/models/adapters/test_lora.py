"""Low-rank adapters: merged as they compute, and the same gradients in every layout."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_models import (
    GPT,
    DeltaNetConfig,
    GlobalCounts,
    LatentAttentionConfig,
    MambaConfig,
    ModelConfig,
    MoEConfig,
    TokenBatch,
    build_model,
    llama,
    preset,
)
from mcore_models.adapters import LoRAConfig, adapters, add_lora, merge, merged
from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import Init, ParallelConfig, ParallelMesh, RngKey, all_reduce
from mcore_parallel.layout import LayoutTensor, gather_all
from mcore_parallel.spec import fill_
from mcore_parallel.testing import RankPool

LLAMA = llama(vocab_size=37, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48)
ONE_HEAD = replace(LLAMA, num_kv_heads=1, linear_bias=True, attention_bias=True)
EXPERTS = replace(
    LLAMA,
    pattern=("*E", "*E"),
    moe=MoEConfig(
        num_experts=4, top_k=2, expert_ffn_size=16, shared_ffn_size=16, latent_size=24
    ),
)  # fmt: skip
MIXED = replace(
    LLAMA,
    num_layers=3,
    pattern=("+-", "M.", "G-"),
    latent=LatentAttentionConfig(
        num_heads=4, q_rank=16, kv_rank=16, head_dim=8, rope_dim=4, value_dim=8
    ),
    mamba=MambaConfig(num_heads=4, head_dim=8, num_groups=2, state_size=8),
    delta_net=DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8),
)
LORA = LoRAConfig(rank=3, alpha=5.0)


def batch_of() -> TokenBatch:
    tokens = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(100, 116)
    return replace(TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1)), rows=rows)


def with_adapters(
    config: ModelConfig, lora: LoRAConfig, mesh: ParallelMesh | None = None, mode: str = "none"
) -> GPT:
    """A model whose adapters change what it computes."""
    recompute = RecomputeConfig(mode=mode)  # type: ignore[arg-type]
    model = build_model(config, mesh, key=RngKey(3), recompute=recompute)
    add_lora(model, lora, key=RngKey(4))
    specs = model.specs()
    for name, parameter in model.named_parameters():
        if name.endswith("lora.b"):
            fill_(parameter, specs[name].layout, Init(kind="normal", std=0.3), RngKey(5))
    return model


def measure(
    config: ModelConfig, lora: LoRAConfig, layout: str, mode: str = "none"
) -> dict[str, Tensor]:
    """The gradients of all adapters, and the loss."""
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.create(parallel) if dist.is_initialized() else ParallelMesh.single()
    assert mesh is not None
    model = with_adapters(config, lora, mesh, mode)
    loss = model.loss(batch_of(), counts=GlobalCounts(tokens=16.0), rng=RngKey(7))
    loss.backward()
    specs, gradients = model.specs(), {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        flat = parameter.grad.flatten().clone()
        for sync in specs[name].grad_sync:
            flat[sync.start : sync.stop] = all_reduce(flat[sync.start : sync.stop], sync.group)
        gradients[name] = LayoutTensor(flat.view_as(parameter), specs[name].layout)
    whole = gather_all(gradients, mesh.world)
    mesh.close()
    return {**whole, "loss": loss.detach()}


def assert_alike(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    total = torch.stack([g.norm() for g in want.values()]).norm()
    for name, gradient in want.items():
        distance = (found[name] - gradient).norm()
        assert distance <= 2e-5 * max(gradient.norm(), 1e-3 * total), name
        assert gradient.norm() > 0, name


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (LLAMA, "tp=2"),
        (LLAMA, "tp=2,sp"),
        (ONE_HEAD, "tp=2,sp"),
        (EXPERTS, "tp=2,ep=2,etp=1"),
        (EXPERTS, "tp=2,sp,ep=1,etp=2"),
        (MIXED, "tp=2"),
        (MIXED, "tp=2,sp"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.layer_pattern[0],
)
def test_gradients_of_one_process(ranks: RankPool, config: ModelConfig, layout: str) -> None:
    """Of q, k, v and gate and up apart, of experts, of what is whole on every rank."""
    want = measure(config, LORA, "tp=1")
    assert_alike(ranks.run(measure, 2, config, LORA, layout)[0], want)


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp"])
def test_dropout_drops_the_same_under_every_layout(ranks: RankPool, layout: str) -> None:
    lora = replace(LORA, dropout=0.4)
    want = measure(LLAMA, lora, "tp=1")
    assert not torch.allclose(want["loss"], measure(LLAMA, LORA, "tp=1")["loss"])
    assert_alike(ranks.run(measure, 2, LLAMA, lora, layout)[0], want)
    assert_alike(measure(LLAMA, lora, "tp=1", "full"), want)  # the second run drops as the first


def test_dropout_needs_a_key_and_is_none_in_evaluation() -> None:
    model = with_adapters(LLAMA, replace(LORA, dropout=0.4))
    with pytest.raises(ValueError, match=r"lora\.dropout=0\.4 .* needs rng"):
        model(torch.arange(8)[None])
    plain = with_adapters(LLAMA, LORA)
    tokens = torch.arange(8)[None]
    assert torch.equal(model.eval()(tokens), plain(tokens))
    with pytest.raises(ValueError, match=r"cannot reach layers\.0\.moe\.experts\.gate"):
        add_lora(build_model(EXPERTS), replace(LORA, dropout=0.1))
    encoder = build_model(preset("t5-small"), device="meta")
    with pytest.raises(ValueError, match=r"lora\.dropout=0\.1 and t5"):
        add_lora(encoder, LoRAConfig(dropout=0.1, targets=("*.attention.q",)))


@pytest.mark.parametrize("config", [LLAMA, ONE_HEAD, EXPERTS, MIXED], ids=[*"abcd"])
def test_merged_weights_compute_the_same(config: ModelConfig) -> None:
    tokens = batch_of().tokens.view(2, 8)
    plain = build_model(config, key=RngKey(3)).eval()
    model = with_adapters(config, LORA).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    want = model(tokens)
    assert (want - plain(tokens)).norm() > 0.05 * want.norm()
    with merged(model):
        assert model.specs().keys() == plain.specs().keys()
        assert (model(tokens) - want).norm() <= 1e-5 * want.norm()
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(model(tokens), want)
    merge(model)
    assert not adapters(model)
    assert (model(tokens) - want).norm() <= 1e-5 * want.norm()


def test_a_new_adapter_changes_nothing_and_alone_is_trained() -> None:
    model = build_model(LLAMA, key=RngKey(3))
    tokens = torch.arange(8)[None]
    want = model(tokens)
    names = add_lora(model, replace(LORA, targets=("*.attention.[qv]", "layers.1.mlp.down")))
    linears = {"layers.0.attention.q", "layers.0.attention.v", "layers.1.mlp.down"}
    assert set(names) == linears | {"layers.1.attention.q", "layers.1.attention.v"}
    assert torch.equal(model(tokens), want)
    specs = model.specs()
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    found = {f.name: f.global_shape for n in trained for f in specs[n].layout.fragments}
    assert found.keys() == {f"{n}.lora_{x}.weight" for n in names for x in "ab"}
    assert found["layers.0.attention.v.lora_b.weight"] == (16, 3)
    assert found["layers.1.mlp.down.lora_a.weight"] == (3, 48)
    # Another layout and another set of adapters begin with the same values.
    other = build_model(LLAMA, key=RngKey(3))
    add_lora(other, LORA)
    a = model.get_submodule("layers.0.attention.qkv.lora").get_parameter("a")
    b = other.get_submodule("layers.0.attention.qkv.lora").get_parameter("a")
    assert torch.equal(a, torch.cat([b[:3], b[6:]]))


def test_experts_have_adapters_of_their_own() -> None:
    specs = with_adapters(EXPERTS, LORA).specs().values()
    shapes = {f.name: f.global_shape for spec in specs for f in spec.layout.fragments}
    assert shapes["layers.0.moe.experts.gate.lora_a.weight"] == (4, 3, 24)
    assert shapes["layers.0.moe.experts.gate.lora_b.weight"] == (4, 16, 3)
    assert shapes["layers.0.moe.experts.down.lora_b.weight"] == (4, 24, 3)


@pytest.mark.parametrize("stabilized", [False, True])
def test_the_scale_is_of_the_rank_or_its_root(stabilized: bool) -> None:
    lora = LoRAConfig(rank=4, alpha=6.0, rank_stabilized=stabilized, targets=("*.attention.o",))
    model = with_adapters(LLAMA, lora)
    adapter = adapters(model)["layers.0.attention.o"]
    a, b = adapter.pairs()[0]
    assert torch.allclose(adapter.delta(), (b @ a) * (3.0 if stabilized else 1.5))


def test_what_is_wrong_is_said_in_one_line() -> None:
    for field, value in (("rank", 0), ("alpha", 0.0), ("dropout", 1.0), ("targets", ())):
        with pytest.raises(ValueError, match=rf"^lora\.{field}.*$"):
            LoRAConfig(**{field: value})  # type: ignore[arg-type]
    model = build_model(LLAMA)
    with pytest.raises(ValueError, match=r"no name matches '\*\.w_q'"):
        add_lora(model, LoRAConfig(targets=("*.w_q",)))
    with pytest.raises(ValueError, match="no name matches"):  # decoding reads these as matrices
        add_lora(build_model(MIXED), LoRAConfig(targets=("*.attention.k_up",)))
    add_lora(model, LORA)
    with pytest.raises(ValueError, match="has adapters"):
        add_lora(model, LORA)
