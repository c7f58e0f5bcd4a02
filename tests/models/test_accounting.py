from dataclasses import replace

import pytest

from mcore_models import (
    AttentionConfig,
    LatentAttentionConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    build_model,
    count_parameters,
    flops_of_documents,
    flops_per_token,
    flops_utilization,
    gpt2,
    llama,
    model_shape,
    preset,
)
from mcore_parallel.cost import shape

LLAMA = llama(vocab_size=37, hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2)
GPT2 = gpt2(vocab_size=37, hidden_size=24, num_layers=2, num_heads=4, max_positions=11)

MOE = MoEConfig(num_experts=6, top_k=2, expert_ffn_size=20)
LATENT = ModelConfig(
    vocab_size=37,
    hidden_size=24,
    num_layers=2,
    latent=LatentAttentionConfig(
        num_heads=4, kv_rank=12, q_rank=20, head_dim=6, rope_dim=4, value_dim=10
    ),
)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        GPT2,
        replace(LLAMA, tied_embeddings=True, attention_bias=True, head_dim=10),
        replace(LLAMA, pattern=("*.", ".-", "*-")),
        replace(GPT2, tied_embeddings=False, position="none", ffn_size=17, norm="rms_norm"),
        replace(LLAMA, activation="gelu", norm="layer_norm", position="learned"),
        replace(LLAMA, moe=MOE),
        replace(GPT2, moe=MOE, pattern=("*-", ".E")),
        replace(LLAMA, moe=replace(MOE, shared_ffn_size=12, shared_gate=True, latent_size=16)),
        replace(GPT2, moe=replace(MOE, shared_ffn_size=12, router_bias=True)),
        replace(LLAMA, moe=MOE, pattern=("*-", "*E", "*E"), mtp=MTPConfig(num_depths=2)),
        replace(GPT2, mtp=MTPConfig()),
        replace(GPT2, norm_place="sum", mtp=MTPConfig()),
        replace(LATENT, latent=replace(LATENT.latent, q_rank=None)),
        replace(LATENT, moe=MOE, mtp=MTPConfig()),
        replace(LLAMA, attention=AttentionConfig(qk_norm="head", gate=True), attention_bias=True),
        replace(GPT2, attention=AttentionConfig(qk_norm="head"), norm_place="both"),
        replace(LLAMA, attention=AttentionConfig(qk_norm="all", sinks=True), norm_place="post"),
        replace(GPT2, attention=AttentionConfig(output_bias=False), mlp_bias=False),
        replace(GPT2, residual="parallel_shared", norm_bias=False, pattern=("*-", ".-")),
        replace(GPT2, residual="parallel", activation="geglu"),
        replace(LLAMA, moe=replace(MOE, expert_bias=True), activation="quick_geglu"),
    ],
)
def test_the_formula_counts_the_built_model(config: ModelConfig) -> None:
    model = build_model(config, device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    count = count_parameters(config)
    assert count.total == sum(sizes.values())
    assert count.embedding == sum(n for name, n in sizes.items() if "embedding." in name)
    linear = sum(
        n
        for name, n in sizes.items()
        if name.endswith(".weight") and "norm" not in name and "embedding" not in name
    )
    head_of_tied = config.vocab_size * config.hidden_size * config.tied_embeddings
    assert count.matmul == linear + head_of_tied
    idle = {n: size * 4 // 6 for n, size in sizes.items() if ".experts." in n}
    assert count.active == count.total - sum(idle.values())
    weights = sum(size for name, size in idle.items() if name.endswith("weight"))
    assert count.active_matmul == count.matmul - weights


def test_a_token_pays_for_the_experts_it_chooses() -> None:
    moe, dense = replace(LLAMA, moe=MOE), replace(LLAMA, ffn_size=2 * 20)
    router = 6 * 3 * 6 * 24  # 6 FLOPs for each weight of three routers
    assert flops_per_token(moe, 64) == flops_per_token(dense, 64) + router
    assert flops_of_documents(moe, [64]) == 64 * flops_per_token(moe, 64)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "mixtral-8x7b", "mixtral-8x22b"])
def test_planning_and_presets_mean_the_same_models(name: str) -> None:
    assert model_shape(preset(name)) == shape(name)


def test_letters_of_builders_are_not_counted_in_silence() -> None:
    with pytest.raises(ValueError, match="'X'"):
        count_parameters(replace(LLAMA, pattern="*- X- *-"))  # type: ignore[arg-type]


def test_flops_per_token_of_a_published_shape() -> None:
    config = preset("llama3-8b-8layers")
    matmul = 8 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
    assert flops_per_token(config, 8192) == 6 * matmul + 6 * 8 * 8192 * 4096


def test_packed_documents_cost_less_attention() -> None:
    whole = flops_of_documents(LLAMA, [64])
    assert whole == 64 * flops_per_token(LLAMA, 64)
    assert flops_of_documents(LLAMA, [32, 32]) == 64 * flops_per_token(LLAMA, 32) < whole


def test_a_window_bounds_what_attention_costs() -> None:
    attention = AttentionConfig(window=16, local_layers=(0, 2))
    windowed = replace(LLAMA, attention=attention)
    assert flops_per_token(windowed, 16) == flops_per_token(LLAMA, 16)
    # Queries see 16 tokens but the first of them, which see half as many: 16 · 64 - 16² / 2 pairs.
    saved = 64 * 64 / 2 - (16 * 64 - 16 * 16 / 2)
    assert flops_of_documents(LLAMA, [64]) - flops_of_documents(windowed, [64]) == pytest.approx(
        2 * saved * 3 * 2 * 4 * 12, rel=1e-9
    )


def test_utilization_is_a_fraction_of_the_peak() -> None:
    per_token = flops_per_token(LLAMA, 128)
    assert flops_utilization(
        LLAMA, seq_length=128, tokens_per_second=10.0, peak_flops=20 * per_token
    ) == pytest.approx(0.5)
