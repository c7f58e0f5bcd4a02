"""BERT, with the heads that each of its classes has."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.gpt2 import GELUS
from mcore_models.hf.llama import PLAIN
from mcore_models.hf.rules import Choice, Field, Only, Ours, Rule
from mcore_parallel.mapping import Drop, Inward, Operator, Rename

_ACTIVATIONS = (("gelu", "gelu"), *GELUS[:-1], ("relu", "relu"), ("silu", "silu"))
_EMBEDDINGS = {
    "word_embeddings": "embedding",
    "position_embeddings": "position_embedding",
    "token_type_embeddings": "token_type_embedding",
}
_PARTS = {
    "attention.self.query": "attention.q",
    "attention.self.key": "attention.k",
    "attention.self.value": "attention.v",
    "attention.output.dense": "attention.o",
    "attention.output.LayerNorm": "mixer_out_norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
    "output.LayerNorm": "feed_forward_out_norm",
}
_KIND = "{kind:weight|bias}"
_OLD_KINDS = {"gamma": "weight", "beta": "bias"}
_HEAD = "cls.predictions.transform"


@dataclass(frozen=True)
class _Heads:
    """Which heads there are: what `ModelConfig.bert` has beyond the segments."""

    masked_head: bool
    pooler: bool
    pair_head: bool

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set them; the class says it, not a field."""
        fields.setdefault("bert", {}).update(vars(self))

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Nothing: the name of the class says it."""


def _operators(prefix: str) -> Callable[[ModelConfig], Iterator[Operator]]:
    """Return the operators of a class whose encoder's tensors have that prefix."""

    def operators(model: ModelConfig) -> Iterator[Operator]:
        yield Inward(tuple(_old_forms(model, prefix)))
        if prefix:
            yield from _heads()
        for theirs, ours in _EMBEDDINGS.items():
            yield Rename(f"{prefix}embeddings.{theirs}.weight", f"{ours}.weight")
        yield Rename(f"{prefix}embeddings.LayerNorm.{_KIND}", "embedding_norm.{kind}")
        for theirs, ours in _PARTS.items():
            name = f"{prefix}encoder.layer.{{layer}}.{theirs}.{_KIND}"
            yield Rename(name, f"layers.{{layer}}.{ours}.{{kind}}")
        yield Rename(f"{prefix}pooler.dense.{_KIND}", "pooler.{kind}")

    return operators


def _heads() -> Iterator[Operator]:
    table = "bert.embeddings.word_embeddings.weight"
    yield Drop("cls.predictions.decoder.weight", repeats=table)
    yield Drop("cls.predictions.decoder.bias", repeats="cls.predictions.bias")
    yield Rename("cls.predictions.bias", "lm_head.bias")
    yield Rename(f"{_HEAD}.dense.{_KIND}", "lm_head.dense.{kind}")
    yield Rename(f"{_HEAD}.LayerNorm.{_KIND}", "lm_head.norm.{kind}")
    yield Rename(f"cls.seq_relationship.{_KIND}", "binary_head.{kind}")


def _old_forms(model: ModelConfig, prefix: str) -> Iterator[Operator]:
    """Yield what folders of earlier versions need.

    Norms had other names, positions were a buffer, and there may be heads that the class lacks.
    """
    assert model.bert is not None
    yield Drop(f"{prefix}embeddings.position_ids")
    if not model.bert.pooler:
        yield Drop(f"{prefix}pooler.dense.{_KIND}")
    if not model.bert.pair_head:
        yield Drop(f"cls.seq_relationship.{_KIND}")
    norms = (
        f"{prefix}embeddings.LayerNorm",
        f"{prefix}encoder.layer.{{layer}}.attention.output.LayerNorm",
        f"{prefix}encoder.layer.{{layer}}.output.LayerNorm",
        *([f"{_HEAD}.LayerNorm"] if prefix else []),
    )
    for norm in norms:
        for old, new in _OLD_KINDS.items():
            yield Rename(f"{norm}.{old}", f"{norm}.{new}")


# Untied, its class has two biases, of which one is read and the other stored in most folders.
_TIED = (Only("tie_word_embeddings", True, absent=True), Ours("tied_embeddings", True))
_RULES: tuple[Rule, ...] = (
    Field("vocab_size", "vocab_size", int),
    Field("hidden_size", "hidden_size", int, default=768),
    Field("num_hidden_layers", "num_layers", int, default=12),
    Field("num_attention_heads", "num_heads", int, default=12),
    Field("intermediate_size", "ffn_size", int, default=3072),
    Field("max_position_embeddings", "max_positions", int, default=512),
    Field("type_vocab_size", "bert.num_token_types", int, default=2),
    Field("layer_norm_eps", "norm_eps", float, default=1e-12),
    Field("initializer_range", "init_std", float, default=0.02),
    Choice("hidden_act", "activation", _ACTIVATIONS),
    Only("position_embedding_type", "absolute", absent="absolute"),
    Only("is_decoder", False, absent=False),
    Only("add_cross_attention", False, absent=False),
    PLAIN,
    Ours("norm", "layer_norm"),
    Ours("norm_place", "sum"),
    Ours("position", "learned"),
    Ours("linear_bias", True),
    Ours("attention.causal", False),
)


def _bert(name: str, *rules: Rule, prefix: str = "bert.") -> Architecture:
    return Architecture(
        name=name, model_type="bert", rules=(*_RULES, *rules), operators=_operators(prefix)
    )


BERT = _bert(
    "BertModel",
    Ours("tied_embeddings", False),
    _Heads(masked_head=False, pooler=True, pair_head=False),
    prefix="",
)
"""`BertModel` (Devlin et al., 2019): the encoder with its pooler."""

BERT_MASKED = _bert("BertForMaskedLM", *_TIED, _Heads(True, pooler=False, pair_head=False))
"""`BertForMaskedLM`: with the head for masked tokens and without a pooler."""

BERT_PRETRAINING = _bert("BertForPreTraining", *_TIED, _Heads(True, pooler=True, pair_head=True))
"""`BertForPreTraining`: with both heads of its training."""
