"""Published encoders, and encoders with decoders, for `preset`.

Sources: Devlin et al., "BERT" (2019); Raffel et al., "Exploring the Limits of Transfer Learning"
(2020); the configurations of the releases of T5 and of its version 1.1 (Shazeer, 2020).
"""

from collections.abc import Mapping

from mcore_models.config import ModelConfig
from mcore_models.hf.bert import BERT_PRETRAINING
from mcore_models.hf.t5 import T5

_BERT_SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
_BERT = {
    "bert-base-uncased": (768, 12, 12, 3072, 30522),
    "bert-base-cased": (768, 12, 12, 3072, 28996),
    "bert-large-uncased": (1024, 24, 16, 4096, 30522),
    "bert-large-cased": (1024, 24, 16, 4096, 28996),
}
_T5_SHAPE = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads")
_T5 = {
    "t5-small": (512, 64, 2048, 6, 8),
    "t5-base": (768, 64, 3072, 12, 12),
    "t5-large": (1024, 64, 4096, 24, 16),
    "t5-3b": (1024, 128, 16384, 24, 32),
    "t5-11b": (1024, 128, 65536, 24, 128),
}
_T5_V1_1 = {
    "t5-v1.1-small": (512, 64, 1024, 8, 6),
    "t5-v1.1-base": (768, 64, 2048, 12, 12),
    "t5-v1.1-large": (1024, 64, 2816, 24, 16),
    "t5-v1.1-xl": (2048, 64, 5120, 24, 32),
    "t5-v1.1-xxl": (4096, 64, 10240, 24, 64),
}
_V1 = {"vocab_size": 32128}
_V1_1 = {**_V1, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

ENCODER_PRESETS: Mapping[str, ModelConfig] = {
    **{
        name: BERT_PRETRAINING.read_config(dict(zip(_BERT_SHAPE, shape, strict=True)))
        for name, shape in _BERT.items()
    },
    **{
        name: T5.read_config({**say, **dict(zip(_T5_SHAPE, shape, strict=True))})
        for models, say in ((_T5, _V1), (_T5_V1_1, _V1_1))
        for name, shape in models.items()
    },
}
"""BERT with both heads of its training, and T5 of both versions."""
