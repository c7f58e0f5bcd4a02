"""Logits and gradients against transformers' own classes, where that library is installed."""

import pytest
import torch
from torch import Tensor

from mcore_models import GPT, build_model, gpt2, llama

transformers = pytest.importorskip("transformers")


def global_parameters(model: GPT) -> dict[str, Tensor]:
    """Views of every global tensor of a whole model, by name."""
    specs = model.specs()
    return {
        fragment.name: view
        for name, parameter in model.named_parameters()
        for fragment, view in specs[name].layout.views(parameter)
    }


def copy_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    ours = global_parameters(model)
    assert ours.keys() == weights.keys()
    with torch.no_grad():
        for name, view in ours.items():
            view.copy_(weights[name])


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


LLAMA_NAMES = {
    "embed_tokens": "embedding",
    "norm": "final_norm",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "self_attn": "attention",
    **{f"{part}_proj": part for part in ("q", "k", "v", "o", "gate", "up", "down")},
}


def from_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, value in weights.items():
        path = name.removeprefix("model.").split(".")
        renamed[".".join(LLAMA_NAMES.get(part, part) for part in path)] = value
    return renamed


def from_gpt2(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {
        "embedding.weight": weights["transformer.wte.weight"],
        "position_embedding.weight": weights["transformer.wpe.weight"],
        "final_norm.weight": weights["transformer.ln_f.weight"],
        "final_norm.bias": weights["transformer.ln_f.bias"],
    }
    parts = {"ln_1": "input_norm", "ln_2": "post_norm", "attn.c_proj": "attention.o"}
    parts |= {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
    for layer in range(len({name.split(".")[2] for name in weights if ".h." in name})):
        theirs, ours = f"transformer.h.{layer}", f"layers.{layer}"
        for kind in ("weight", "bias"):
            for part, name in parts.items():
                value = weights[f"{theirs}.{part}.{kind}"]
                # Their Conv1D keeps [in, out].
                renamed[f"{ours}.{name}.{kind}"] = value.t() if value.dim() == 2 else value
            fused = weights[f"{theirs}.attn.c_attn.{kind}"].chunk(3, -1)
            for name, value in zip("qkv", fused, strict=True):
                renamed[f"{ours}.attention.{name}.{kind}"] = (
                    value.t() if value.dim() == 2 else value
                )
    return renamed


def test_llama_dress() -> None:
    config = llama(
        vocab_size=97, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_size=96,
        max_positions=64, rope_base=5e5, norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
            rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
            tie_word_embeddings=False, initializer_range=0.1,
        )
    )  # fmt: skip
    check(build_model(config), theirs, from_llama)


def test_gpt2_dress() -> None:
    config = gpt2(vocab_size=97, hidden_size=64, num_layers=3, num_heads=4, max_positions=32)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.1, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    check(build_model(config), theirs, from_gpt2)


def check(model: GPT, theirs: torch.nn.Module, rename: object) -> None:
    tied = model.config.tied_embeddings
    weights = {n: p.detach() for n, p in theirs.named_parameters() if not (tied and "lm_head" in n)}
    copy_weights(model, rename(weights))  # type: ignore[operator]
    tokens = torch.randint(97, (2, 24))
    ours, other = model(tokens), theirs(tokens).logits
    assert relative(ours, other) < 1e-5
    direction = torch.randn_like(other)
    (ours * direction).sum().backward()
    (other * direction).sum().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters() if n in weights}
    want = rename(gradients)  # type: ignore[operator]
    specs = model.specs()
    total = torch.stack([value.norm() for value in want.values()]).norm()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for fragment, view in specs[name].layout.views(parameter.grad):
            reference = want[fragment.name]
            bound = 1e-4 * max(reference.norm(), 1e-3 * total)
            assert (view - reference).norm() < bound, fragment.name
