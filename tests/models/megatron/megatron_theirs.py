"""What a rank of Megatron-LM holds of a model of ours: its tensors cut by plain loops."""

import hashlib
import re
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def digest(value: torch.Tensor) -> str:
    """Return a hash of a tensor's elements, bit for bit."""
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:20]


def _chunk(value: torch.Tensor, place: dict[str, Any], dim: int = 0) -> torch.Tensor:
    return value.chunk(place["case"]["tp"], dim)[place["tp"]]


def _glu(gate: torch.Tensor, up: torch.Tensor, place: dict[str, Any]) -> torch.Tensor:
    return torch.cat([_chunk(gate, place), _chunk(up, place)])


def _qkv(ours: Tensors, layer: str, kind: str, place: dict[str, Any]) -> torch.Tensor:
    case = place["case"]
    size, groups = case["hidden"] // case["heads"], case["kv_heads"]
    q, k, v = (ours[f"{layer}.attention.{part}.{kind}"] for part in "qkv")
    each = case["heads"] // groups * size
    rows = []
    for group in range(groups):
        rows += [q[group * each : (group + 1) * each]]
        rows += [part[group * size : (group + 1) * size] for part in (k, v)]
    return _chunk(torch.cat(rows), place)


def _mlp(ours: Tensors, prefix: str, name: str, kind: str, place: dict[str, Any]) -> torch.Tensor:
    if name == "linear_fc2":
        down = ours[f"{prefix}.down.{kind}"]
        return _chunk(down, place, 1) if kind == "weight" else down
    up = ours[f"{prefix}.up.{kind}"]
    gate = ours.get(f"{prefix}.gate.{kind}")
    return _chunk(up, place) if gate is None else _glu(gate, up, place)


def local(ours: Tensors, name: str, place: dict[str, Any]) -> torch.Tensor:
    """Return what the rank calls `name`. place: what the oracle says about the rank."""
    if "word_embeddings" in name:
        return _chunk(ours["embedding.weight"], place)
    if name == "output_layer.weight":
        return _chunk(ours.get("lm_head.weight", ours["embedding.weight"]), place)
    if "position_embeddings" in name:
        return ours["position_embedding.weight"]
    if match := re.fullmatch(r"decoder\.final_layernorm\.(\w+)", name):
        return ours[f"final_norm.{match[1]}"]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(\w+)", name)
    assert match, name
    layer, rest, kind = f"layers.{int(match[1]) + place['first_layer']}", match[2], match[3]
    plain = {"input_layernorm": "input_norm", "pre_mlp_layernorm": "post_norm",
             "self_attention.q_layernorm": "attention.q_norm", "mlp.router": "moe.router",
             "self_attention.k_layernorm": "attention.k_norm"}  # fmt: skip
    if rest in plain:
        kind = "correction" if kind == "expert_bias" else kind
        return ours[f"{layer}.{plain[rest]}.{kind}"]
    if rest == "self_attention.linear_proj":
        value = ours[f"{layer}.attention.o.{kind}"]
        return _chunk(value, place, 1) if kind == "weight" else value
    if rest == "self_attention.linear_qkv":
        return _qkv(ours, layer, kind, place)
    if match := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(\w+)", rest):
        case = place["case"]
        expert = int(match[1]) + place["ep"] * (case["experts"] // case["ep"])
        held = {n: v[expert] for n, v in ours.items() if n.startswith(f"{layer}.moe.experts.")}
        return _mlp(held, f"{layer}.moe.experts", match[2], kind, place)
    if rest.startswith("mlp.shared_experts."):
        return _mlp(ours, f"{layer}.moe.shared", rest.rpartition(".")[2], kind, place)
    assert rest.startswith("mlp."), name
    return _mlp(ours, f"{layer}.mlp", rest.rpartition(".")[2], kind, place)
