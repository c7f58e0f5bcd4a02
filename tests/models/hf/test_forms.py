"""Forms that published folders have besides the one that transformers writes today."""

import json
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_ckpt.convert import convert
from mcore_ckpt.hf import HFFolder, load_hf
from mcore_models import GPT, AttentionConfig, ModelConfig, MoEConfig, RopeConfig, build_model
from mcore_models.hf import ARCHITECTURES, differences
from mcore_parallel import Group

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
import folders  # noqa: E402
from families import FAMILIES, config_class, random_model  # noqa: E402
from over_ranks import tensors_of  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

TOKENS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
_STACK = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def loaded(folder: Path) -> GPT:
    model = build_model(HFFolder.open(folder, known=ARCHITECTURES).model, key=None).eval()
    tensors = tensors_of(model, "model/")
    load_hf(folder, tensors, Group.single(), prefix="model/", known=ARCHITECTURES)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found = model(TOKENS)
    result: Tensor = found if isinstance(found, Tensor) else found.logits
    return result


def rewritten(folder: Path, change: Any, **config: Any) -> None:
    """Change a folder's tensors, and fields of its config."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    """Names without their prefix, masks among the tensors; today's names come out."""
    source = folders.save(random_model("gpt2"), tmp_path / "gpt2")
    original = load_file(source / "model.safetensors")
    mask = torch.ones(64, 64).tril().view(1, 1, 64, 64)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        first = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        return first | {f"h.{layer}.attn.bias": mask.clone() for layer in (0, 1)}

    rewritten(source, change)
    assert torch.allclose(logits(loaded(source)), logits(random_model("gpt2")), atol=1e-4)
    convert(("hf", source), ("native", tmp_path / "native"), known=ARCHITECTURES)
    convert(("native", tmp_path / "native"), ("hf", tmp_path / "out"), known=ARCHITECTURES)
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in back)
    rewritten(source, lambda tensors: {n: v for n, v in tensors.items() if n != "h.1.ln_1.bias"})
    with pytest.raises(ValueError, match=r"no tensor transformer\.h\.1\.ln_1\.bias, which its"):
        loaded(source)
    rewritten(source, lambda tensors: {**tensors, "h.1.ln_1.bias": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"model\.safetensors: transformer\.h\.1\.ln_1\.bias has"):
        loaded(source)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "glm-4.5"])
def test_experts_that_are_stored_together(tmp_path: Path, family: str) -> None:
    """As transformers holds them, which saves them so when it is told; out they come one by one."""
    model = random_model(family)
    one_by_one = folders.save(model, tmp_path / "one")
    together = folders.save(model, tmp_path / "all", save_original_format=False)
    original = load_file(one_by_one / "model.safetensors")
    assert len(load_file(together / "model.safetensors")) < len(original)
    convert(("hf", together), ("native", tmp_path / "native"), known=ARCHITECTURES)
    convert(("native", tmp_path / "native"), ("hf", tmp_path / "out"), known=ARCHITECTURES)
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in back)


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 of [in, out]: codes [out, in / 32, 16] and scales [out, in / 32], rounded down."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = weight.t().unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).clamp_min(1e-9).log2().floor() - 2
    scaled = blocks / 2 ** exponents.unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) >= magnitudes).sum(-1) - 1 + 8 * (scaled < 0)
    pairs = codes.to(torch.uint8).unflatten(-1, (16, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).to(torch.uint8)


def test_gpt_oss_without_scaled_positions() -> None:
    """Where its config says nothing, positions are scaled: a model without says so."""
    architecture = ARCHITECTURES["GptOssForCausalLM"]
    scaled = architecture.read_config(FAMILIES["gpt-oss"][1])
    model = replace(scaled, rope=RopeConfig())
    written = json.loads(json.dumps(architecture.write_config(model)))
    assert architecture.read_config(written) == replace(model, num_kv_heads=2)
    theirs = transformers.GptOssConfig(**written)
    assert theirs.rope_parameters["rope_type"] == "default"
    assert theirs.rope_parameters["rope_theta"] == model.rope_base


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Read as transformers' own decoder reads it; written as plain numbers, with a config of such.

    A conversion of an expert is of its own tensors, so that a rank decodes its experts alone.
    """
    decode = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    model = random_model("gpt-oss", hidden_size=64, intermediate_size=64)
    source = folders.save(model, tmp_path / "gpt-oss")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for name, value in tensors.items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                made[name] = value
                continue
            codes = [packed(expert) for expert in value]
            made[f"{name}_blocks"], made[f"{name}_scales"] = map(
                torch.stack, zip(*codes, strict=True)
            )
            plain = decode(made[f"{name}_blocks"], made[f"{name}_scales"], dtype=torch.float32)
            with torch.no_grad():
                model.get_parameter(name).copy_(plain)
        return made

    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    rewritten(source, change, quantization_config=quantised)
    assert torch.allclose(logits(loaded(source)), logits(model), atol=1e-4)
    convert(("hf", source), ("native", tmp_path / "native"), known=ARCHITECTURES)
    convert(("native", tmp_path / "native"), ("hf", tmp_path / "out"), known=ARCHITECTURES)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert torch.allclose(logits(loaded(tmp_path / "out")), logits(model), atol=1e-4)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.allclose(logits(again), logits(model), atol=1e-4)
    rewritten(source, lambda tensors: tensors, quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="only quant_method 'mxfp4' and none are"):
        loaded(source)
    folder = HFFolder.open(tmp_path / "out", known=ARCHITECTURES)
    metas = {name: folder.tensors().meta(name) for name in folder.tensors()}
    resolved = folder.mapping.forward(metas)
    steps = {step.outputs: step.inputs for step in resolved.steps.values()}
    sizes = {tensor.layout.numel for inputs in steps.values() for tensor in inputs}
    assert max(sizes) == 64 * 2 * 64, "of one expert"


PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama 3.1": (
        "LlamaForCausalLM",
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
        {
            "rope_base": 5e5,
            "rope": RopeConfig(
                scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_length=8192,
            ),
        },
    ),
    "Phi-3 128k": (
        "Phi3ForCausalLM",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            },
        },
        {
            "rope": RopeConfig(
                scaling="longrope", factor=32.0, short_factors=(1.0,) * 8, long_factors=(2.0,) * 8,
                original_length=4096,
            ),
        },
    ),
    "LLaMA with lists of factors and a factor of their own": (
        "LlamaForCausalLM",
        {
            "rope_scaling": {
                "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 512, "factor": 4.0, "attention_factor": 1.25,
            },
        },
        {
            "rope": RopeConfig(
                scaling="longrope", factor=4.0, short_factors=(1.0,) * 8, long_factors=(2.0,) * 8,
                original_length=512, attention_factor=1.25,
            ),
        },
    ),
    "Gemma 2 tuned without caps": (
        "Gemma2ForCausalLM",
        {
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 16,
            "num_key_value_heads": 2,
        },
        {
            "logit_softcap": None,
            "attention": AttentionConfig(
                output_bias=False, scale=0.0625, window=4096, local_layers=(0, 2)
            ),
        },
    ),
    "Phi-4-mini": (
        "Phi3ForCausalLM",
        {"partial_rotary_factor": 0.75, "rope_scaling": None},
        {"rope": RopeConfig(rotary_dim=12)},
    ),
    "GPT-NeoX": (
        "GPTNeoXForCausalLM",
        {"rotary_pct": 0.5, "rotary_emb_base": 20000, "hidden_act": "gelu_fast"},
        {"rope_base": 20000.0, "rope": RopeConfig(rotary_dim=8), "activation": "gelu_tanh"},
    ),
    "Qwen2 with a window of no effect": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": False, "sliding_window": 131072, "num_key_value_heads": 2},
        {"attention": AttentionConfig()},
    ),
    "Gemma 3 of transformers 4": (
        "Gemma3ForCausalLM",
        {
            "rope_theta": 1000000, "rope_local_base_freq": 5000, "sliding_window": 512,
            "sliding_window_pattern": 2, "head_dim": 16, "num_key_value_heads": 2,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        {
            "rope_base": 1e6,
            "rope": RopeConfig(scaling="linear", factor=8.0),
            "attention": AttentionConfig(
                qk_norm="head", output_bias=False, scale=0.0625, window=512, local_layers=(0, 2),
                local_rope_base=5000.0,
            ),
        },
    ),
    "Qwen3 with experts in every second layer": (
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2,
            "moe_intermediate_size": 32, "num_key_value_heads": 2,
        },
        {
            "pattern": ("*-", "*E", "*-", "*E"),
            "moe": MoEConfig(
                num_experts=8, top_k=2, expert_ffn_size=32, normalise_top_k=False
            ),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_they_were_published(name: str) -> None:
    """Read into our words, kept as they are on the way out, and changed where a field changes."""
    kind, fields, ours = PUBLISHED[name]
    architecture = ARCHITECTURES[kind]
    config = {"architectures": [kind], "model_type": architecture.model_type, **_STACK, **fields}
    model = architecture.read_config(config)
    assert {field: getattr(model, field) for field in ours} == ours
    assert architecture.write_config(model, config) == config
    theirs = getattr(transformers, kind).config_class(**config).to_dict()
    assert not list(differences(architecture.read_config(theirs), model))
    changed = ModelConfig(**{**vars(model), "max_positions": 77, "rope_base": 12345.0})
    written = architecture.write_config(changed, config)
    assert not list(differences(architecture.read_config(written), changed))
    theirs = getattr(transformers, kind).config_class(**written).to_dict()
    again = architecture.read_config(theirs)
    assert [name for name, _, _ in differences(again, changed) if name != "rope.factor"] == []


def test_a_kind_of_scaling_by_its_first_name() -> None:
    _, fields, ours = PUBLISHED["Phi-3 128k"]
    scaling = {**fields["rope_scaling"], "type": "su"}
    read = ARCHITECTURES["Phi3ForCausalLM"].read_config(
        {**_STACK, **fields, "rope_scaling": scaling}
    )
    assert read.rope == ours["rope"]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types=['full_attention'] must be 4 times 'full_attention' or",
        ),
        ("MistralForCausalLM", {"sliding_window": "8"}, "sliding_window='8' must be of type int"),
        (
            "Gemma2ForCausalLM",
            {"query_pre_attn_scalar": 0},
            "query_pre_attn_scalar=0 must be a number greater than 0",
        ),
        (
            "Gemma2ForCausalLM",
            {"hidden_activation": "relu"},
            "hidden_activation='relu' is not supported: only 'gelu_pytorch_tanh', 'gelu_new'",
        ),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "rope_parameters.sliding_attention.rope_type='yarn' is not supported",
        ),
        ("Gemma3ForCausalLM", {"rope_parameters": 3}, "rope_parameters=3 is no object"),
        (
            "Phi3ForCausalLM",
            {"partial_rotary_factor": 1.5},
            "partial_rotary_factor=1.5 must be greater than 0 and at most 1",
        ),
        (
            "Glm4MoeForCausalLM",
            {"first_k_dense_replace": 4},
            "first_k_dense_replace=4 is not supported: 0 to 3 of 4 layers",
        ),
        ("Glm4MoeForCausalLM", {"n_shared_experts": -1}, "n_shared_experts=-1 must be a number"),
        (
            "Qwen3MoeForCausalLM",
            {"decoder_sparse_step": 0},
            "decoder_sparse_step=0 and mlp_only_layers=[] must be a number of at least 1",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"mlp_only_layers": [0, 1, 2, 3]},
            "leave none of 4 layers with experts",
        ),
        (
            "MixtralForCausalLM",
            {"num_experts_per_tok": 1},
            "normalise_top_k with top_k=1 weighs every choice by 1, and the router never learns",
        ),
        (
            "Glm4MoeForCausalLM",
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "normalise_top_k with top_k=1 weighs every choice by 1, and the router never learns",
        ),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
        ("GPTNeoXForCausalLM", {"use_parallel_residual": 3}, "use_parallel_residual=3 is not"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(kind: str, fields: dict[str, Any], message: str) -> None:
    config = {**_STACK, "num_key_value_heads": 2, **fields}
    with pytest.raises(ValueError) as caught:
        ARCHITECTURES[kind].read_config(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


ROPE = {
    **{"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0},
    **{"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.0},
}


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "phi3-longrope", "qwen2-moe", "glm-4.5"])
def test_whatever_a_field_has_is_read_or_refused_in_one_line(family: str) -> None:
    """Values of all types, also within the parameters of positions: never another error."""
    full = config_class(family)(**FAMILIES[family][1]).to_dict()
    (known,) = [x for x in ARCHITECTURES.values() if x.model_type == full["model_type"]]
    said: list[str] = []

    def read(config: dict[str, Any]) -> None:
        try:
            known.read_config(config)
        except ValueError as error:
            said.append(str(error))

    read(full)
    assert not said
    listed = {"sliding_window_pattern", "max_window_layers", "quantization_config", *full}
    plain = {name: value for name, value in full.items() if name != "layer_types"}
    for value in (None, "x", -1, 0, 1.5, [], {}, ["x"]):
        for name in listed:
            read({**plain, name: value})
        for scaling in ("linear", "llama3", "yarn", "longrope", value):
            for name in (*ROPE, "rope_type"):
                given = {"rope_type": scaling, **ROPE, name: value}
                read({**full, "rope_parameters": given})
    assert len(said) > 100
    assert not any("\n" in message for message in said)


@pytest.mark.parametrize(
    ("named", "nearest"),
    [
        ("Qwen3_5MoeForCausalLM", "Qwen3MoeForCausalLM"),
        ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
        ("GPTJForCausalLM", "GPTNeoXForCausalLM"),
        ("MambaForCausalLM", "Mamba2ForCausalLM"),
    ],
)
def test_an_unknown_architecture_is_refused_by_name(
    tmp_path: Path, named: str, nearest: str
) -> None:
    config = {"architectures": [named], "model_type": "unknown", **_STACK}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"architectures names {named}, which nothing") as caught:
        HFFolder.open(tmp_path, known=ARCHITECTURES)
    assert f"(nearest: {nearest})" in str(caught.value)


def test_every_architecture_is_registered() -> None:
    """For the commands, which know of this package what it has registered."""
    found = {entry.name: entry for entry in entry_points(group="mcore_ckpt.mappings")}
    for name, architecture in ARCHITECTURES.items():
        assert found[f"hf.{name}"].load() is architecture
