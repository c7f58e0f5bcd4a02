"""GPT as Megatron-LM keeps it, dense and with experts: its tensors, and how ranks cut them.

Names are those of its sharded checkpoints with one tensor for each layer and each expert, whatever
the layer is made of: `decoder.layers.<i>.self_attention.linear_qkv.layer_norm_weight` is the norm
before attention, also where the module itself calls it `input_layernorm.weight`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_models.build import build_model
from mcore_models.config import GATES, ModelConfig
from mcore_models.megatron.arguments import padded_vocabulary, read_arguments
from mcore_parallel.layout import TensorLayout
from mcore_parallel.mapping import (
    Drop,
    Exact,
    Operator,
    Rename,
    Reshape,
    Split,
    Stack,
    TensorMapping,
)
from mcore_parallel.mapping.tensors import Tensors

Cut = Literal["whole", "rows", "columns", "gated"]

_LAYER, _OURS = "decoder.layers.{layer}", "layers.{layer}"
_EXPERT = f"{_LAYER}.mlp.experts.experts.{{expert}}"
_EXPERTS = f"{_OURS}.moe.experts"
_ROWS = re.compile(r"word_embeddings|output_layer|linear_qkv\.(weight|bias)$|linear_fc1")
_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")


@dataclass(frozen=True, kw_only=True)
class MegatronModel:
    """A model of Megatron-LM.

    Attributes:
        config: what it computes.
        padded_vocab_size: rows of its embedding in the files, padding included.
        fused_norms: whether the modules have each norm within the linear layer that follows it.
        grouped: whether they have the experts of a rank together, first layers before second ones.
        flattened: whether they have all first layers of a rank's experts as one matrix.
    """

    config: ModelConfig
    padded_vocab_size: int
    fused_norms: bool
    grouped: bool
    flattened: bool

    @property
    def gated(self) -> bool:
        """Whether the first linear layer of an MLP is two, one of them a gate."""
        return self.config.activation in GATES


@dataclass(frozen=True)
class Padded(Operator):
    """A vocabulary with rows of padding: theirs has `padded` rows, ours the first `rows`."""

    theirs: str
    ours: str
    rows: int
    padded: int

    def forward(self, tensors: Tensors) -> None:
        """Leave the padding out; ValueError when it is another number of rows."""
        if self.theirs in tensors.entries:
            found = tensors.take(self.theirs)
            if found.shape[0] != self.padded:
                raise ValueError(
                    f"{self.theirs} has {found.shape[0]} rows, padded_vocab_size says {self.padded}"
                )
            tensors.put(self.ours, found.layout.slice(0, 0, self.rows), found.dtype)

    def inverse(self, tensors: Tensors) -> None:
        """Add the padding, of which nothing is known."""
        if self.ours in tensors.entries:
            found = tensors.take(self.ours)
            rest = TensorLayout.padding((self.padded - self.rows, *found.shape[1:]))
            parts = [found.layout, rest] if self.padded > self.rows else [found.layout]
            tensors.put(self.theirs, TensorLayout.concat(parts), found.dtype)


class MegatronGPT:
    """What `mcore-ckpt` asks about checkpoints of Megatron-LM's GPT (`mcore_ckpt.megatron`)."""

    name = "gpt"

    def read_args(self, args: Mapping[str, Any]) -> MegatronModel:
        """Return the model that stored arguments describe.

        Raises:
            ValueError: an argument is missing, or has a value that is not supported; names it.
        """
        config, padded = read_arguments(args), padded_vocabulary(args)
        if padded < config.vocab_size:
            raise ValueError(
                f"padded_vocab_size={padded} is less than vocab_size={config.vocab_size}"
            )
        fused = args.get("transformer_impl", "transformer_engine") != "local"
        grouped = bool(config.moe is not None and args.get("moe_grouped_gemm"))
        return MegatronModel(
            config=config,
            padded_vocab_size=padded,
            fused_norms=fused,
            grouped=grouped,
            flattened=grouped and (not fused or bool(args.get("moe_use_legacy_grouped_gemm"))),
        )

    def to_tree(self, model: MegatronModel) -> dict[str, Any]:
        """Return a model as JSON values."""
        return asdict(model.config)

    def shapes(self, model: MegatronModel) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every global tensor of ours."""
        specs = build_model(model.config, device="meta", key=None).specs()
        return {f.name: f.global_shape for spec in specs.values() for f in spec.layout.fragments}

    def mapping(self, model: MegatronModel) -> TensorMapping:
        """Return the mapping between their tensors and ours."""
        return TensorMapping(_operators(model))

    def cut(self, model: MegatronModel, name: str) -> Cut:
        """Return how tensor-parallel ranks cut a tensor of theirs.

        "rows": along its first dimension. "gated": so, the gate and the rest each by itself.
        "columns": along its second. "whole": every rank has all of it.
        """
        if "layer_norm" in name or "router" in name:
            return "whole"
        if _COLUMNS.search(name):
            return "columns"
        if not _ROWS.search(name):
            return "whole"
        return "gated" if "linear_fc1" in name and model.gated else "rows"

    def canonical(self, name: str, layer_offset: int, expert_offset: int) -> str | None:
        """Return the name of what a module calls `name` itself; None for what is no tensor.

        layer_offset: index of the first layer of the pipeline stage. expert_offset: of the first
        expert of the rank.
        """
        if name.endswith("_extra_state") or "rotary_pos_emb" in name:
            return None
        if name.endswith("local_tokens_per_expert"):
            return None
        if name.startswith("language_model."):
            raise ValueError(f"{name} is of a model before Megatron Core: convert it there first")

        def moved(match: re.Match[str]) -> str:
            return f"decoder.layers.{int(match[1]) + layer_offset}."

        name = re.sub(r"^decoder\.layers\.(\d+)\.", moved, name)
        name = re.sub(
            r"\.experts\.(?:local_experts|experts)\.(\d+)\.",
            lambda m: f".experts.experts.{int(m[1]) + expert_offset}.",
            name,
        )
        name = re.sub(
            r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$",
            lambda m: f".experts.experts.{int(m[3]) + expert_offset}.{m[1]}.{m[2]}",
            name,
        )
        name = re.sub(r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_", name)
        return re.sub(r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_", name)

    def stage(
        self,
        model: MegatronModel,
        layers: Sequence[int],
        experts: Sequence[int],
        *,
        first: bool,
        last: bool,
    ) -> list[str]:
        """Return the parameters of a pipeline stage in the order in which its modules have them.

        layers, experts: global indices of those that it holds. first, last: of the pipeline.

        Raises:
            ValueError: experts are parameters that are cut in another way.
        """
        config = model.config
        if model.flattened and experts:
            raise ValueError(
                "moe_grouped_gemm without Transformer Engine: the order of experts in optimizer "
                "state is not known, only weights are read"
            )
        names = []
        if first:
            names.append("embedding.word_embeddings.weight")
        if first and config.position == "learned":
            names.append("embedding.position_embeddings.weight")
        for layer in layers:
            for name in _layer(model, layer, experts):
                names.append(f"decoder.layers.{layer}.{name}")
        if last:
            names += _norm(config, "decoder.final_layernorm.")
            if not (first and config.tied_embeddings):  # a stage of its own has a copy
                names.append("output_layer.weight")
        return names


def _norm(config: ModelConfig, prefix: str) -> list[str]:
    kinds = ("weight", "bias") if config.norm == "layer_norm" else ("weight",)
    return [prefix + kind for kind in kinds]


def _linear(name: str, bias: bool) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"] if bias else [f"{name}.weight"]


def _layer(model: MegatronModel, layer: int, experts: Sequence[int]) -> Iterator[str]:
    """Yield the parameters of a layer in order."""
    config = model.config
    bias, fused = config.linear_bias, model.fused_norms
    norm = _norm(config, "self_attention.linear_qkv.layer_norm_")
    if not fused:
        yield from norm
    yield from _linear("self_attention.linear_proj", bias)
    if fused:
        yield from norm
    yield from _linear("self_attention.linear_qkv", config.qkv_bias)
    if config.attention.qk_norm is not None:
        for part in ("q_layernorm.", "k_layernorm."):
            yield from _norm(config, f"self_attention.{part}")
    norm = _norm(config, "mlp.linear_fc1.layer_norm_")
    if "E" not in config.layer_pattern[layer]:
        yield from norm
        yield from _linear("mlp.linear_fc1", bias)
        yield from _linear("mlp.linear_fc2", bias)
        return
    yield from norm
    yield "mlp.router.weight"
    yield from _expert_layers(model, experts)
    assert config.moe is not None
    if config.moe.shared_ffn_size:
        if config.moe.shared_gate:
            yield "mlp.shared_experts.gate_weight"
        yield from _linear("mlp.shared_experts.linear_fc1", bias)
        yield from _linear("mlp.shared_experts.linear_fc2", bias)


def _expert_layers(model: MegatronModel, experts: Sequence[int]) -> Iterator[str]:
    """Yield the parameters of a layer's experts in order."""
    names = [f"mlp.experts.experts.{expert}" for expert in experts]
    kinds = ("weight", "bias") if model.config.linear_bias else ("weight",)
    layers = ("linear_fc1", "linear_fc2")
    if model.grouped:
        yield from (f"{name}.{x}.{kind}" for x in layers for kind in kinds for name in names)
    else:
        yield from (f"{name}.{x}.{kind}" for name in names for x in layers for kind in kinds)


def _operators(model: MegatronModel) -> Iterator[Operator]:
    config = model.config
    if config.tied_embeddings:
        yield Drop("output_layer.weight", repeats="embedding.word_embeddings.weight")
    for theirs, ours in (
        ("embedding.word_embeddings.weight", "embedding.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        yield Padded(theirs, ours, config.vocab_size, model.padded_vocab_size)
    yield Rename("embedding.position_embeddings.weight", "position_embedding.weight")
    yield Rename("decoder.final_layernorm.{kind:weight|bias}", "final_norm.{kind}")
    for theirs, ours in (
        ("self_attention.linear_qkv.layer_norm_{kind:weight|bias}", "input_norm.{kind}"),
        ("mlp.linear_fc1.layer_norm_{kind:weight|bias}", "post_norm.{kind}"),
        ("self_attention.linear_proj.{kind:weight|bias}", "attention.o.{kind}"),
        ("self_attention.{part:q|k}_layernorm.{kind:weight|bias}", "attention.{part}_norm.{kind}"),
        ("mlp.router.weight", "moe.router.weight"),
        ("mlp.router.expert_bias", "moe.router.correction"),
        ("mlp.shared_experts.gate_weight", "moe.shared_gate.weight"),
    ):
        yield Rename(f"{_LAYER}.{theirs}", f"{_OURS}.{ours}")
    yield from _queries(config, "weight", (config.hidden_size,))
    yield from _queries(config, "bias", ())
    for theirs, ours in (("mlp", "mlp"), ("mlp.shared_experts", "moe.shared")):
        yield from _mlp(model, f"{_LAYER}.{theirs}", f"{_OURS}.{ours}")
    if config.moe is not None:
        yield from _experts(model)
        if config.moe.keeps_load:
            weight, load = f"{_OURS}.moe.router.weight", f"{_OURS}.moe.router.load"
            yield Exact((weight,), (weight, load), _with_load, _without_load)


def _with_load(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Shares of the last batch's choices, which theirs do not keep: they begin with zeros."""
    (weight,) = tensors
    return weight, torch.zeros(len(weight), dtype=torch.float32, device=weight.device)


def _without_load(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors[:1]


def _queries(config: ModelConfig, kind: str, rest: tuple[int, ...]) -> Iterator[Operator]:
    """Yield the way from query groups (queries, key, value of each) to q, k and v."""
    groups, size = config.kv_heads, config.head_size
    heads = config.num_heads // groups
    fused = f"{_LAYER}.self_attention.linear_qkv.{kind}"
    parts = [f"{_OURS}.attention.{part}.{kind}" for part in "qkv"]
    rows = (heads * size, size, size)
    yield Reshape(fused, (groups * sum(rows), *rest), (groups, sum(rows), *rest))
    yield Split(fused, tuple(parts), sizes=rows, dim=1)
    for part, count in zip(parts, rows, strict=True):
        yield Reshape(part, (groups, count, *rest), (groups * count, *rest))


def _mlp(model: MegatronModel, theirs: str, ours: str) -> Iterator[Operator]:
    for kind in ("weight", "bias"):
        if model.gated:
            parts = (f"{ours}.gate.{kind}", f"{ours}.up.{kind}")
            yield Split(f"{theirs}.linear_fc1.{kind}", parts)
        else:
            yield Rename(f"{theirs}.linear_fc1.{kind}", f"{ours}.up.{kind}")
        yield Rename(f"{theirs}.linear_fc2.{kind}", f"{ours}.down.{kind}")


def _experts(model: MegatronModel) -> Iterator[Operator]:
    for kind in ("weight", "bias"):
        enter, leave = f"{_EXPERTS}.up.{kind}", f"{_EXPERTS}.down.{kind}"
        if model.gated:
            both = f"{_EXPERTS}.gate_up.{kind}"
            yield Stack(f"{_EXPERT}.linear_fc1.{kind}", both)
            yield Split(both, (f"{_EXPERTS}.gate.{kind}", enter), dim=1)
        else:
            yield Stack(f"{_EXPERT}.linear_fc1.{kind}", enter)
        yield Stack(f"{_EXPERT}.linear_fc2.{kind}", leave)


GPT = MegatronGPT()
"""GPT of Megatron-LM, registered as `megatron.gpt`."""
