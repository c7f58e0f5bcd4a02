"""A small random model of every Hugging Face architecture that is a decoder with attention."""

from typing import Any

import torch
import transformers

_STACK = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
_GPT2 = {
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
_NEOX = {name: value for name, value in _STACK.items() if name != "num_key_value_heads"}
_SOME = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {**_STACK, "rope_parameters": _LLAMA3, "mlp_bias": True}),
    "linear": (
        "Llama",
        {**_STACK, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("Mistral", {**_STACK, "sliding_window": 7}),
    "qwen2": (
        "Qwen2",
        {**_STACK, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**_STACK, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            **_STACK,
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {**_STACK, "head_dim": 16, "sliding_window": 7, "layer_types": _SOME},
    ),
    "gemma": ("Gemma", {**_STACK, "head_dim": 16}),
    "olmo3": ("Olmo3", {**_STACK, "sliding_window": 7, "layer_types": _SOME}),
    "granite": (
        "Granite",
        {
            **_STACK,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 4.0,
        },
    ),
    "smollm3": ("SmolLM3", {**_STACK, "no_rope_layers": [1, 0]}),
    "starcoder2": ("Starcoder2", {**_STACK, "sliding_window": 7}),
    "cohere": ("Cohere", {**_STACK, "logit_scale": 0.5, "attention_bias": True}),
    "olmo2": ("Olmo2", {**_STACK, "attention_bias": True}),
    "phi3": ("Phi3", {**_STACK, "sliding_window": 9}),
    "phi3-longrope": (
        "Phi3",
        {**_STACK, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
    ),
    "gpt2": ("GPT2", _GPT2),
    "gpt-neox": ("GPTNeoX", _NEOX),
    "gpt-neox-in-turn": (
        "GPTNeoX",
        {**_NEOX, "use_parallel_residual": False, "attention_bias": False},
    ),
    "mixtral": ("Mixtral", {**_STACK, **_EXPERTS, "num_local_experts": 4}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **_STACK,
            **_EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **_STACK,
            **_EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **_STACK,
            **_EXPERTS,
            "num_local_experts": 4,
            "head_dim": 16,
            "sliding_window": 7,
            "swiglu_limit": 1.0,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_STACK,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "kv_lora_rank": 12,
            "q_lora_rank": 20,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 6,
            "v_head_dim": 10,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": True},
        },
    ),
    "glm-4.5": (
        "Glm4Moe",
        {
            **_STACK,
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 16,
        },
    ),
}
"""Name: the class without its ending, and the fields of its config."""

_CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def config_class(family: str) -> Any:
    return getattr(transformers, FAMILIES[family][0] + "Config")


def random_model(family: str, **changes: Any) -> Any:
    """The same model each time; vectors are not what they begin with."""
    kind, fields = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, _CLASSES.get(kind, kind + "ForCausalLM"))(
        config_class(family)(**{**fields, **changes})
    )
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() < 2 and not name.endswith(("inv_freq", "embed_scale")):
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif name.endswith("_bias"):
                tensor.normal_(std=0.2)
    return model.eval()
