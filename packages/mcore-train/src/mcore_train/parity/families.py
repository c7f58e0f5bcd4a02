"""Small models of every family, on which combinations of parallelism are tried."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np

from mcore_data import IndexedWriter
from mcore_kernels import KernelConfig
from mcore_models import (
    AttentionConfig,
    BertConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    MambaConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    T5Config,
)
from mcore_train.config import LogConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from mcore_train.data_config import BatchConfig, DataConfig
from mcore_train.denoising import MaskingOptions, SpanOptions

FAMILIES = ("gpt", "moe", "hybrid", "bert", "t5")
STEPS = 3
SAMPLES = 4
"""Samples of a global batch; each is a micro-batch."""
_VOCABULARY = 61  # no multiple of any degree: the vocabulary is padded
_LENGTH = 16


@cache
def family_config(family: str, *, tokens: Path | None = None) -> TrainConfig:
    """Return how a small model of the family is trained in one process, in fp32 with dropout.

    The families differ in whatever training might stumble over. gpt: layer norms, biases, learned
    positions, tied embeddings. moe: experts beside dense layers, fewer key than query heads, latent
    attention, rotary positions, a further token predicted. hybrid: Mamba-2, attention, a gated
    delta net and experts with biases. bert: norms of sums, tokens that see later ones, two
    segments. t5: an encoder and a decoder with biases for distances. `tokens` are files of short
    documents (`write_documents`), which are packed and attend to themselves only; without them
    every sample is one document of random tokens, or a text of these and what fills it up.
    """
    data = DataConfig(mock=True, seq_length=_LENGTH)
    if tokens is not None and family in _DENOISING:
        data = DataConfig(
            train=tokens,
            split="8,2",
            seq_length=_LENGTH,
            **_DENOISING[family],  # type: ignore[arg-type]
        )
    elif tokens is not None:
        data = DataConfig(
            train=tokens,
            split="8,2",
            seq_length=_LENGTH,
            eod_id=0,
            mask_eod_loss=True,
            reset_positions=True,
            reset_attention=True,
        )
    return TrainConfig(
        model=_MODELS[family],
        steps=STEPS,
        seed=8,
        data=data,
        batch=BatchConfig(global_size=SAMPLES, micro_size=1),
        optimizer=OptimizerConfig(eps=1e-3),
        schedule=ScheduleConfig(lr=1e-2, min_lr=1e-3, warmup_steps=2),
        log=LogConfig(progress=False, tensorboard=False),
        kernels=KernelConfig(),
        device="cpu",
    )


_DENOISING = {
    "bert": {"masking": MaskingOptions(mask_id=3, cls_id=1, sep_id=2, rate=0.3)},
    "t5": {"spans": SpanOptions(first_sentinel=60, num_sentinels=8, target_length=16, rate=0.3)},
}


def write_documents(prefix: Path, family: str) -> Path:
    """Write documents of 1 to 12 tokens and their ends: uneven for every number of ranks.

    For bert and t5 of 2 to 4 sentences of 2 to 6 tokens.
    """
    rng = np.random.default_rng(3)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(40):
            if family in _DENOISING:
                sizes = rng.integers(2, 7, rng.integers(2, 5))
                text = rng.integers(4, 52, sizes.sum())
            else:
                text = np.append(rng.integers(1, _VOCABULARY, rng.integers(1, 13)), 0)
                sizes = np.array([len(text)])
            writer.add_document(text.astype(np.uint16), sizes.tolist())
    return prefix


_SHARED = ModelConfig(
    vocab_size=_VOCABULARY,
    hidden_size=32,
    num_layers=3,
    num_heads=8,
    ffn_size=48,
    dropout=0.1,
    # With larger weights (and the seed) experts that compete have clearly different scores.
    init_std=0.1,
)
_MODELS = {
    "gpt": dataclasses.replace(
        _SHARED,
        norm="layer_norm",
        activation="gelu_tanh",
        position="learned",
        max_positions=_LENGTH,
        linear_bias=True,
        tied_embeddings=True,
    ),
    "moe": dataclasses.replace(
        _SHARED,
        num_kv_heads=1,
        pattern=("*E", "+-", ".E"),
        moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_size=24, aux_loss_coefficient=0.05),
        latent=LatentAttentionConfig(
            num_heads=8, kv_rank=12, q_rank=20, head_dim=4, rope_dim=2, value_dim=6
        ),
        mtp=MTPConfig(loss_weight=0.5),
    ),
    "hybrid": dataclasses.replace(
        _SHARED,
        num_kv_heads=2,
        linear_bias=True,
        pattern=("M-", "*E", "GE"),
        moe=MoEConfig(
            num_experts=4,
            top_k=2,
            expert_ffn_size=24,
            normalise_top_k=False,
            aux_loss_coefficient=0.05,
            aux_loss_scope="micro_batch",
        ),
        mamba=MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=1, chunk_size=4),
        delta_net=DeltaNetConfig(
            num_key_heads=1, num_value_heads=8, key_head_dim=6, value_head_dim=4, chunk_size=4
        ),
    ),
    "bert": dataclasses.replace(
        _SHARED,
        norm="layer_norm",
        norm_place="sum",
        activation="gelu",
        position="learned",
        max_positions=_LENGTH,
        linear_bias=True,
        tied_embeddings=True,
        attention=AttentionConfig(causal=False),
        bert=BertConfig(),
    ),
    "t5": dataclasses.replace(
        _SHARED,
        num_layers=2,
        activation="geglu_tanh",
        position="none",
        tied_embeddings=True,
        logit_scale=_SHARED.hidden_size**-0.5,
        attention=AttentionConfig(scale=1.0),
        t5=T5Config(num_decoder_layers=1, num_buckets=8, max_distance=10),
    ),
}
