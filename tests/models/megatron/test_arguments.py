"""Stored arguments as an architecture, and what modules have in which order."""

import dataclasses
from typing import Any

import pytest
import torch

from mcore_models.megatron import GPT
from mcore_models.megatron.arguments import read_arguments
from mcore_parallel.mapping import TensorMeta, evaluate

ARGS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4,
    "group_query_attention": True, "num_query_groups": 2, "kv_channels": 16,
    "max_position_embeddings": 128, "norm_epsilon": 1e-6, "normalization": "RMSNorm",
    "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope",
    "rotary_base": 500000, "untie_embeddings_and_output_weights": True, "vocab_size": 100,
    "padded_vocab_size": 128, "transformer_impl": "transformer_engine",
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}


def test_a_llama() -> None:
    model = read_arguments(ARGS)
    assert (model.vocab_size, model.hidden_size, model.num_layers) == (100, 64, 4)
    assert (model.num_heads, model.kv_heads, model.head_size, model.mlp_size) == (4, 2, 16, 96)
    assert (model.norm, model.norm_eps, model.activation) == ("rms_norm", 1e-6, "swiglu")
    assert (model.position, model.rope_base, model.tied_embeddings) == ("rope", 500000.0, False)
    assert not model.linear_bias
    assert not model.qkv_bias


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"kv_channels": 32}, {"head_size": 32}),
        ({"group_query_attention": False}, {"kv_heads": 4}),
        ({"swiglu": False}, {"activation": "gelu"}),
        ({"swiglu": False, "openai_gelu": True}, {"activation": "gelu_tanh"}),
        (
            {"swiglu": False, "bias_gelu_fusion": True, "add_bias_linear": True},
            {"activation": "gelu_tanh", "linear_bias": True},
        ),
        ({"swiglu": False, "squared_relu": True}, {"activation": "squared_relu"}),
        ({"add_qkv_bias": True}, {"qkv_bias": True, "linear_bias": False}),
        ({"position_embedding_type": "learned_absolute"}, {"position": "learned"}),
        ({"apply_layernorm_1p": True}, {"zero_centered_norm": True}),
        ({"rotary_percent": 0.5}, {"rotary_size": 8}),
        ({"vocab_size": None}, {"vocab_size": 128}),
        ({"tokenizer_type": "NullTokenizer"}, {"vocab_size": 101}),
        ({"make_vocab_size_divisible_by": 64}, {"vocab_size": 100}),
        ({"make_vocab_size_divisible_by": 16}, {"vocab_size": 128}),
        (
            {"make_vocab_size_divisible_by": 16, "tensor_model_parallel_size": 4},
            {"vocab_size": 100},
        ),
        ({"num_experts": 4, "moe_router_topk": 2}, {"layer_pattern": ("*E",) * 4}),
        ({**EXPERTS, "moe_layer_freq": 2}, {"layer_pattern": ("*E", "*-") * 2}),
        ({**EXPERTS, "moe_layer_freq": [0, 0, 1, 1]}, {"layer_pattern": ("*-", "*-", "*E", "*E")}),
    ],
)
def test_what_arguments_change(changed: dict[str, Any], expected: dict[str, Any]) -> None:
    model = read_arguments({**ARGS, **changed})
    assert {name: getattr(model, name) for name in expected} == expected


def test_routers() -> None:
    plain = read_arguments({**ARGS, **EXPERTS, "moe_aux_loss_coeff": 0.02}).moe
    assert plain is not None
    assert (plain.num_experts, plain.top_k, plain.expert_ffn_size) == (4, 2, 32)
    assert (plain.score_function, plain.normalise_top_k) == ("softmax", True)
    assert (plain.aux_loss_coefficient, plain.aux_loss_scope) == (0.02, "micro_batch")
    before = read_arguments({**ARGS, **EXPERTS, "moe_router_pre_softmax": True}).moe
    assert before is not None
    assert not before.normalise_top_k
    deepseek = read_arguments({
        **ARGS, **EXPERTS, "num_experts": 8, "moe_router_topk": 4, "moe_router_num_groups": 4,
        "moe_router_group_topk": 2, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True,
        "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4,
    }).moe  # fmt: skip
    assert deepseek is not None
    assert (deepseek.num_groups, deepseek.top_groups, deepseek.group_score_experts) == (4, 2, 2)
    assert (deepseek.correction_rate, deepseek.scaling_factor) == (1e-3, 2.5)
    assert (deepseek.shared_ffn_size, deepseek.shared_gate) == (48, True)
    assert deepseek.aux_loss_scope == "sequence"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"multi_latent_attention": True}, "multi_latent_attention=True is not supported"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 is not supported"),
        ({"num_layers": None}, "num_layers=None must be a whole number"),
        ({"normalization": "L2Norm"}, "normalization='L2Norm' is not supported"),
        ({"position_embedding_type": "mrope"}, "position_embedding_type='mrope' is not supp"),
        ({"quick_geglu": True}, "quick_geglu=True is not supported"),
        ({**EXPERTS, "moe_layer_freq": [1, 0]}, "must be a number or a list of 4 zeros and ones"),
        (
            {**EXPERTS, "moe_router_load_balancing_type": "quantile"},
            "moe_router_load_balancing_type='quantile' is not supported",
        ),
        ({"padded_vocab_size": 96}, "padded_vocab_size=96 is less than vocab_size=100"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPT.read_args({**ARGS, **changed})


def test_padding_of_the_vocabulary_is_left_out() -> None:
    model = GPT.read_args(ARGS)
    mapping = GPT.mapping(model)
    shapes = GPT.shapes(model)
    ours = {name: TensorMeta(shape, torch.float32) for name, shape in shapes.items()}
    theirs = {name: m.shape for name, m in mapping.inverse(ours).tensors.items()}
    assert theirs["embedding.word_embeddings.weight"] == (128, 64)
    values = {name: torch.randn(shape) for name, shape in theirs.items()}
    metas = {name: TensorMeta(shape, torch.float32) for name, shape in theirs.items()}
    found = evaluate(mapping.forward(metas), values)
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes
    assert torch.equal(found["lm_head.weight"], values["output_layer.weight"][:100])
    metas["output_layer.weight"] = TensorMeta((100, 64), torch.float32)
    with pytest.raises(ValueError, match="has 100 rows, padded_vocab_size says 128"):
        mapping.forward(metas)


def test_the_order_of_parameters_is_that_of_the_modules() -> None:
    """Each tensor is there once; where norms lie and how experts are grouped changes the order."""
    args = {**ARGS, **EXPERTS, "moe_layer_freq": [0, 1, 1, 1], "normalization": "LayerNorm"}
    fused = GPT.read_args({**args, "moe_grouped_gemm": True})
    apart = GPT.read_args({**args, "transformer_impl": "local"})
    ours = {n: TensorMeta(s, torch.float32) for n, s in GPT.shapes(fused).items()}
    names = set(GPT.mapping(fused).inverse(ours).tensors)
    for model in (fused, apart):
        order = GPT.stage(model, range(4), range(4), first=True, last=True)
        assert len(order) == len(set(order))
        assert set(order) == names
    stages = [GPT.stage(m, [1], [2, 3], first=False, last=False) for m in (fused, apart)]
    first = [[name.removeprefix("decoder.layers.1.") for name in names] for names in stages]
    attention = ["self_attention.linear_qkv.layer_norm_weight",
                 "self_attention.linear_qkv.layer_norm_bias"]  # fmt: skip
    assert first[0][:3] == ["self_attention.linear_proj.weight", *attention]
    assert first[1][:3] == [*attention, "self_attention.linear_proj.weight"]
    experts = "mlp.experts.experts.{}.linear_fc{}.weight"
    assert first[0][-4:] == [experts.format(e, n) for n in (1, 2) for e in (2, 3)]
    assert first[1][-4:] == [experts.format(e, n) for e in (2, 3) for n in (1, 2)]
    flat = dataclasses.replace(fused, flattened=True)
    with pytest.raises(ValueError, match="only weights are read"):
        GPT.stage(flat, [1], [0], first=False, last=False)
