"""Adapters as PEFT has them: `adapter_config.json`, and names of tensors, in both directions."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mcore_models.adapters.config import LoRAConfig
from mcore_parallel.mapping import Rename, TensorMapping

ROOT = "base_model.model.model"
_LAYER = {"attention": ("self_attn", "q|k|v|o"), "mlp": ("mlp", "gate|up|down")}


def peft_mapping() -> TensorMapping:
    """Between PEFT's tensors and ours, for models whose layers are called as Llama's are."""
    return TensorMapping(
        [
            Rename(
                f"{ROOT}.layers.{{layer}}.{theirs}.{{part:{parts}}}_proj.lora_{matrix}.weight",
                f"layers.{{layer}}.{ours}.{{part}}.lora_{matrix.lower()}.weight",
            )
            for ours, (theirs, parts) in _LAYER.items()
            for matrix in "AB"
        ]
    )


def peft_config(config: LoRAConfig, linears: Sequence[str], base: str | None) -> dict[str, Any]:
    """`adapter_config.json` for adapters of the linear layers of these names.

    `base` is where the model without them is to be found.

    Raises:
        ValueError: a layer that those of Llama do not have.
    """
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": [_theirs(name) for name in linears],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.rank_stabilized,
    }


def lora_config(tree: Mapping[str, Any], tensors: Collection[str]) -> LoRAConfig:
    """What an `adapter_config.json` says of adapters whose tensors, by PEFT's names, are these.

    Raises:
        ValueError: a kind of adapter, or of layer, that is not here; names field or tensor.
    """
    wanted = {"peft_type": ("LORA",), "bias": ("none", None)}
    for name in ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern"):
        wanted[name] = (False, None, {}, [])  # type: ignore[assignment]
    for name, values in wanted.items():
        if (value := tree.get(name)) not in values:
            raise ValueError(f"{name}={value!r} is not supported: only {values[0]!r} is")
    targets = dict.fromkeys(_ours(name) for name in tensors)
    try:
        return LoRAConfig(
            rank=int(tree["r"]),
            alpha=float(tree["lora_alpha"]),
            dropout=float(tree.get("lora_dropout") or 0.0),
            rank_stabilized=bool(tree.get("use_rslora")),
            targets=tuple(targets),
        )
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing") from None


def _theirs(name: str) -> str:
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "layers" and pieces[2] in _LAYER:
        module, parts = _LAYER[pieces[2]]
        if pieces[3] in parts.split("|"):
            return f"model.layers.{pieces[1]}.{module}.{pieces[3]}_proj"
    raise ValueError(f"{name} is no linear layer such as Llama has: its name in PEFT is not known")


def _ours(tensor: str) -> str:
    pieces = tensor.removeprefix(f"{ROOT}.").split(".")
    modules = {theirs: ours for ours, (theirs, _) in _LAYER.items()}
    if len(pieces) == 6 and pieces[0] == "layers" and pieces[2] in modules:
        ours = modules[pieces[2]]
        part = pieces[3].removesuffix("_proj")
        if part in _LAYER[ours][1].split("|") and pieces[4] in ("lora_A", "lora_B"):
            return f"layers.{pieces[1]}.{ours}.{part}"
    raise ValueError(f"{tensor} is no adapter of a linear layer such as Llama has")
