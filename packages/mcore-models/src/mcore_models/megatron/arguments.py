"""The arguments that Megatron-LM stores in its checkpoints, read as a `ModelConfig`.

Names are those of its command line, with underscores. An argument that is absent has the default
that the command line gave it when it was not there yet.
"""

from collections.abc import Mapping
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.parts import AttentionConfig, MoEConfig, RopeConfig

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False, None),
    "mtp_num_layers": (None, 0),
    "is_hybrid_model": (False, None),
    "hybrid_override_pattern": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_type": (None,),
    "add_position_embedding": (True, None),
    "attention_output_gate": (False, None),
    "softmax_type": ("vanilla", None),
    "window_attn_skip_freq": (None,),
    "window_size": (None,),
    "no_rope_freq": (None,),
    "heterogeneous_layers_config_path": (None,),
    "moe_latent_size": (None,),
    "moe_apply_probs_on_input": (False, None),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0, None),
    "multi_token_prediction": (None, False),
    "apply_residual_connection_post_layernorm": (False, None),
}
"""Arguments that say what is not built here, with the values that say that it is not there."""

_NORMS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
_POSITIONS = {"rope": "rope", "learned_absolute": "learned", "none": "none"}
_BALANCE = {
    "aux_loss": "micro_batch",
    "seq_aux_loss": "sequence",
    "global_aux_loss": "global",
}


def read_arguments(args: Mapping[str, Any]) -> ModelConfig:
    """Return the model that stored arguments describe.

    What says nothing about the architecture is not looked at.

    Raises:
        ValueError: an argument is missing, or has a value that is not supported; names it.
    """
    for name, allowed in _ONLY.items():
        if args.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{name}={args[name]!r} is not supported: only {allowed[0]!r} is")
    heads, head_dim = _number(args, "num_attention_heads"), args.get("kv_channels")
    hidden = _number(args, "hidden_size")
    size = hidden // heads if head_dim is None else int(head_dim)
    ffn = args.get("ffn_hidden_size")
    grouped = bool(args.get("group_query_attention"))
    return ModelConfig(
        vocab_size=_vocabulary(args),
        hidden_size=hidden,
        num_layers=_number(args, "num_layers"),
        num_heads=heads,
        num_kv_heads=_number(args, "num_query_groups") if grouped else None,
        head_dim=None if size * heads == hidden else size,
        ffn_size=4 * hidden if ffn is None else int(ffn),
        max_positions=_number(args, "max_position_embeddings"),
        norm=_choice(args, "normalization", _NORMS, "LayerNorm"),
        norm_eps=float(args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5))),
        zero_centered_norm=bool(args.get("apply_layernorm_1p")),
        activation=_activation(args),
        position=_choice(args, "position_embedding_type", _POSITIONS, "learned_absolute"),
        rope_base=float(args.get("rotary_base") or 10000),
        rope=_rope(args, size),
        linear_bias=bool(args.get("add_bias_linear", True)),
        attention_bias=bool(args.get("add_qkv_bias")),
        attention=AttentionConfig(qk_norm="head" if args.get("qk_layernorm") else None),
        tied_embeddings=not args.get("untie_embeddings_and_output_weights"),
        init_std=float(args.get("init_method_std") or 0.02),
        dropout=float(args.get("hidden_dropout") or 0.0),
        pattern=_pattern(args),
        moe=_experts(args) if args.get("num_experts") else None,
    )


def padded_vocabulary(args: Mapping[str, Any]) -> int:
    """Return the number of rows that the embedding has in the files."""
    return _number(args, "padded_vocab_size")


def _vocabulary(args: Mapping[str, Any]) -> int:
    """The rows that mean something, as far as can be told; else all that there are.

    `vocab_size` is what a user gave, before the end of document of the null tokenizer, and many
    tokenizers ignore it: it counts where it explains the padding.
    """
    padded = padded_vocabulary(args)
    if args.get("vocab_size") is None:
        return padded
    rows = _number(args, "vocab_size") + str(args.get("tokenizer_type")).startswith("Null")
    multiple = args.get("make_vocab_size_divisible_by")
    if multiple is None:
        return rows
    multiple *= int(args.get("tensor_model_parallel_size") or 1)
    return rows if -(-rows // multiple) * multiple == padded else padded


def _number(args: Mapping[str, Any], name: str) -> int:
    value = args.get(name)
    if type(value) is not int:
        raise ValueError(f"{name}={value!r} must be a whole number")
    return value


def _choice(args: Mapping[str, Any], name: str, known: Mapping[str, str], default: str) -> Any:
    value = args.get(name, default)
    if value not in known:
        raise ValueError(f"{name}={value!r} is not supported: known are {', '.join(known)}")
    return known[value]


def _activation(args: Mapping[str, Any]) -> Any:
    if args.get("quick_geglu"):
        raise ValueError("quick_geglu=True is not supported: known are swiglu and gelu")
    if args.get("swiglu"):
        return "swiglu"
    if args.get("squared_relu"):
        return "squared_relu"
    # The fused bias and gelu of Megatron-LM is the one with tanh, whatever else is said.
    fused = args.get("bias_gelu_fusion") and args.get("add_bias_linear", True)
    return "gelu_tanh" if args.get("openai_gelu") or fused else "gelu"


def _rope(args: Mapping[str, Any], size: int) -> RopeConfig:
    share = float(args.get("rotary_percent", 1.0) or 1.0)
    turned = int(size * share)
    scaled: dict[str, Any] = {}
    if args.get("use_rope_scaling"):  # the numbers of Llama 3.1, of which one can be given
        scaled = {
            "scaling": "llama3",
            "factor": float(args.get("rope_scaling_factor") or 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_length": 8192,
        }
    return RopeConfig(
        rotary_dim=None if turned == size else turned,
        interleaved=bool(args.get("rotary_interleaved")),
        **scaled,
    )


def _pattern(args: Mapping[str, Any]) -> tuple[str, ...] | None:
    layers, every = _number(args, "num_layers"), args.get("moe_layer_freq", 1)
    if not args.get("num_experts") or every == 1:
        return None
    if isinstance(every, int):
        chosen = [i % every == 0 for i in range(layers)]
    elif isinstance(every, list) and len(every) == layers and {*every} <= {0, 1}:
        chosen = [bool(one) for one in every]
    else:
        raise ValueError(
            f"moe_layer_freq={every!r} must be a number or a list of {layers} zeros and ones"
        )
    return tuple("*E" if expert else "*-" for expert in chosen)


def _experts(args: Mapping[str, Any]) -> MoEConfig:
    top_k = _number(args, "moe_router_topk")
    score = args.get("moe_router_score_function", "softmax")
    groups, top_groups = args.get("moe_router_num_groups"), args.get("moe_router_group_topk")
    biased = args.get("moe_router_enable_expert_bias")
    shared = args.get("moe_shared_expert_intermediate_size")
    width = "ffn_hidden_size" if args.get("moe_ffn_hidden_size") is None else "moe_ffn_hidden_size"
    before = score == "softmax" and args.get("moe_router_pre_softmax")
    return MoEConfig(
        num_experts=_number(args, "num_experts"),
        top_k=top_k,
        expert_ffn_size=_number(args, width),
        score_function=score,
        normalise_top_k=not before and top_k > 1,
        scaling_factor=float(args.get("moe_router_topk_scaling_factor") or 1.0),
        num_groups=groups or 1,
        top_groups=top_groups or 1,
        group_score_experts=max(top_k // top_groups, 1) if top_groups else 1,
        correction_rate=float(args.get("moe_router_bias_update_rate", 1e-3)) if biased else None,
        capacity_factor=args.get("moe_expert_capacity_factor"),
        pad_to_capacity=bool(args.get("moe_pad_expert_input_to_capacity")),
        drop_policy=_dropped(args),
        shared_ffn_size=shared or 0,
        shared_gate=bool(shared and args.get("moe_shared_expert_gate")),
        z_loss_coefficient=float(args.get("moe_z_loss_coeff") or 0.0),
        **_balance(args),
    )


def _dropped(args: Mapping[str, Any]) -> Any:
    known = {"probs": "probability", "position": "position"}
    return _choice(args, "moe_token_drop_policy", known, "probs")


def _balance(args: Mapping[str, Any]) -> dict[str, Any]:
    """The losses that balance experts: one kind or several."""
    kinds = args.get("moe_router_load_balancing_type", "aux_loss")
    weights = args.get("moe_aux_loss_coeff", 0.0)
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = list(weights) if isinstance(weights, list | tuple) else [weights] * len(kinds)
    if kinds == ["sinkhorn"]:
        return {"expert_choice": "sinkhorn", "aux_loss_coefficient": 0.0}
    if kinds == ["none"]:
        return {"aux_loss_coefficient": 0.0}
    for kind in kinds:
        if kind not in _BALANCE:
            raise ValueError(
                f"moe_router_load_balancing_type={kind!r} is not supported: known are "
                f"{', '.join([*_BALANCE, 'sinkhorn', 'none'])}"
            )
    scopes = tuple(_BALANCE[kind] for kind in kinds)
    if len(scopes) == 1:
        return {"aux_loss_coefficient": float(weights[0] or 0.0), "aux_loss_scope": scopes[0]}
    numbers = tuple(float(weight or 0.0) for weight in weights)
    return {"aux_loss_coefficient": numbers, "aux_loss_scope": scopes}
