"""Small configs and data for the tests of mcore-train."""

from pathlib import Path
from typing import Any

import numpy as np

from mcore_data import IndexedWriter
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree

VOCABULARY = 61  # no multiple of any tp: the vocabulary is padded


def toy_tree(**fields: Any) -> dict[str, Any]:
    """A LLaMA dress of four layers; `fields` replace whole sections or extend mappings."""
    tree: dict[str, Any] = {
        "steps": 6,
        "model": {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_size": 48,
        },
        "data": {"mock": True, "seq_length": 8},
        "batch": {"global_size": 4, "micro_size": 2},
        "optimizer": {"eps": 1e-4},
        "schedule": {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2},
        "evaluate": {"windows": 5},
        "log": {"progress": False, "tensorboard": False, "interval": 1},
        "device": "cpu",
    }
    for name, value in fields.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) and name in tree else value
    return tree


def toy(**fields: Any) -> TrainConfig:
    return config_from_tree(toy_tree(**fields))


GPT2_DRESS = {
    "norm": "layer_norm",
    "activation": "gelu_tanh",
    "position": "learned",
    "linear_bias": True,
    "tied_embeddings": True,
    "num_kv_heads": 4,
    "max_positions": 32,
}


def write_tokens(prefix: Path, *, documents: int = 40, eod: int = 0, seed: int = 3) -> Path:
    """Indexed documents of 1 to 12 tokens, each ended by `eod`."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            text = rng.integers(1, VOCABULARY, rng.integers(1, 13))
            writer.add_document(np.append(text, eod).astype(np.uint16))
    return prefix
