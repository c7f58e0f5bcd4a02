"""config.json and ModelConfig: what is read, what is refused, what is written."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from mcore_models import MambaConfig, ModelConfig, MoEConfig, gpt2, llama, preset
from mcore_models.hf import LLAMA, Architecture

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def test_fields_that_are_absent_have_the_defaults_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    read = LLAMA.read_config(SMALL)
    full = LLAMA.read_config(transformers.LlamaConfig(**SMALL).to_dict())
    assert read.kv_heads == full.kv_heads == 4
    assert read.head_size == full.head_size == 16
    assert replace(read, num_kv_heads=4, head_dim=16) == full
    assert (read.norm_eps, read.rope_base, read.max_positions) == (1e-6, 10000.0, 2048)
    assert not read.tied_embeddings
    assert not read.linear_bias


def test_every_field_of_transformers_is_known() -> None:
    """A new field of the class may change what it computes: then a rule has to say so."""
    transformers = pytest.importorskip("transformers")
    base = set(transformers.PreTrainedConfig().to_dict())
    ruled = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "initializer_range", "rms_norm_eps", "hidden_act",
        "tie_word_embeddings", "attention_bias", "mlp_bias", "rope_parameters",
    }  # fmt: skip
    means_nothing = {
        "use_cache",  # of generation there
        "pad_token_id", "bos_token_id", "eos_token_id",  # of the tokenizer
        "pretraining_tp",  # how the products are cut there, not what they are
        "attention_dropout",  # of training there
    }  # fmt: skip
    own = set(transformers.LlamaConfig().to_dict()) - base
    assert own <= ruled | means_nothing
    read = LLAMA.read_config({**SMALL, **dict.fromkeys(means_nothing, 3)})
    assert read == LLAMA.read_config(SMALL)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}},
    ],
)
def test_rotary_positions_of_all_versions(rope: dict[str, Any]) -> None:
    config = {**SMALL, **rope}
    read = LLAMA.read_config(config)
    assert read.rope_base == 5e5
    written = LLAMA.write_config(read, config)
    assert {name: written[name] for name in rope} == rope
    changed = LLAMA.write_config(replace(read, rope_base=1e6), config)
    assert LLAMA.read_config(changed).rope_base == 1e6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size='many' must be of type int"),
        ({"vocab_size": True}, "vocab_size=True must be of type int"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be of type float"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be of type bool"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu' is"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config={'quant_method': 'fp8'} is not supported: only None is",
        ),
        ({"attention_bias": 1}, "attention_bias=1 must be of type bool"),
        ({"mlp_bias": "yes"}, "mlp_bias='yes' must be of type bool"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_theta": 5e5},
            "rope.scaling='llama3' needs rope.low_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type='dynamic' is not supported: only 'default', 'linear', 'llama3'",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
            },
            "rope_scaling.rope_type='dynamic' is not supported",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "rope_scaling.factor='2' must be a number",
        ),
        ({"rope_parameters": []}, "rope_parameters=[] is no object"),
        (
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
            "rope_parameters.rope_type='proportional' is not supported",
        ),
        ({"rope_parameters": 3}, "rope_parameters=3 is no object"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}},
            "differs between layers, which is not supported",
        ),
        ({"rope_theta": "1e4"}, "rope_theta='1e4' must be of type float"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        LLAMA.read_config({**SMALL, **fields})
    assert "\n" not in str(caught.value)


def test_a_config_that_was_read_is_written_as_it_was() -> None:
    """Spelling of numbers and foreign fields included, and without the fields that it left out."""
    config = {**SMALL, "rope_theta": 10000, "rms_norm_eps": 1e-06, "dtype": "bfloat16", "x": [1]}
    written = LLAMA.write_config(LLAMA.read_config(config), config)
    assert json.dumps(written) == json.dumps(config)
    changed = LLAMA.write_config(replace(LLAMA.read_config(config), vocab_size=7), config)
    assert {**config, "vocab_size": 7}.items() <= changed.items()
    assert changed["head_dim"] == 16


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-70b", "smollm2-135m", "tinyllama-1.1b"])
def test_presets_become_configs_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = preset(name)
    written = json.loads(json.dumps(LLAMA.write_config(model)))
    config = transformers.LlamaConfig(**written)
    assert config.rope_parameters["rope_theta"] == model.rope_base
    assert LLAMA.read_config(config.to_dict()) == LLAMA.read_config(written)
    again = LLAMA.read_config(written)
    assert (again.kv_heads, again.head_size, again.mlp_size) == (
        model.kv_heads,
        model.head_size,
        model.mlp_size,
    )
    assert LLAMA.from_tree(json.loads(json.dumps(LLAMA.to_tree(model)))) == model


BASE = llama(vocab_size=10, hidden_size=8, num_layers=2, num_heads=2)
OTHERS: list[tuple[ModelConfig, str]] = [
    (gpt2(vocab_size=10, hidden_size=8, num_layers=2, num_heads=2), "norm='layer_norm'"),
    (replace(BASE, attention_bias=True), "attention.output_bias=False, its own is True"),
    (replace(BASE, position="none"), "position='none', its own is 'rope'"),
    (replace(BASE, activation="gelu"), "activation='gelu', its own is 'swiglu'"),
    (replace(BASE, pattern=("*-", "*.")), "layer 1 of pattern='*.', its own is '*-'"),
    (
        replace(BASE, moe=MoEConfig(num_experts=2, top_k=2, expert_ffn_size=4)),
        "moe=MoEConfig(num_experts=2",
    ),
    (
        replace(
            BASE,
            pattern=("M-", "*-"),
            mamba=MambaConfig(num_heads=2, head_dim=4, state_size=4, num_groups=1),
        ),
        "mamba=MambaConfig(",
    ),
]


@pytest.mark.parametrize(("model", "message"), OTHERS)
def test_a_model_of_another_kind_is_no_llama(model: ModelConfig, message: str) -> None:
    expected = f"LlamaForCausalLM cannot express {message}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        LLAMA.write_config(model)


def test_what_only_training_knows_does_not_hinder() -> None:
    model = replace(BASE, dropout=0.1, init_depth_scaled=False, init_std=0.3)
    assert LLAMA.write_config(model)["initializer_range"] == 0.3


def test_nested_parts_come_back_from_a_tree() -> None:
    model = replace(BASE, moe=MoEConfig(num_experts=2, top_k=2, expert_ffn_size=4))
    tree = json.loads(json.dumps(LLAMA.to_tree(model)))
    assert LLAMA.from_tree(tree) == model
    with pytest.raises(ValueError, match="no model architecture: "):
        LLAMA.from_tree({"hidden": 3})


def test_an_architecture_is_a_value_that_prints() -> None:
    assert isinstance(LLAMA, Architecture)
    assert "LlamaForCausalLM" in repr(LLAMA)
