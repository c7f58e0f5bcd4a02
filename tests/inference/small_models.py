"""Models, checkpoints and oracles for the tests of mcore-inference."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mcore_ckpt
from mcore_data import ByteTokenizer
from mcore_models import (
    GPT,
    AttentionConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    MambaConfig,
    ModelConfig,
    MTPConfig,
    RopeConfig,
    gpt2,
    llama,
)
from mcore_parallel import LayoutTensor

VOCABULARY = 257  # the byte tokenizer's, odd: padded under tp 2
POSITIONS = 24
# Wide initial values, so that the next token depends on all before and no two are near equal.
_SHAPE = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "init_std": 0.4}
LLAMA = llama(vocab_size=VOCABULARY, num_kv_heads=2, ffn_size=48, **_SHAPE)  # type: ignore[arg-type]
GPT2 = gpt2(vocab_size=VOCABULARY, max_positions=POSITIONS, **_SHAPE)  # type: ignore[arg-type]
_MAMBA = MambaConfig(num_heads=8, head_dim=8, state_size=6, num_groups=2, chunk_size=4)
MAMBA = ModelConfig(vocab_size=VOCABULARY, hidden_size=32, num_layers=2, init_std=0.4, mamba=_MAMBA)
_DELTA = DeltaNetConfig(
    num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=8, chunk_size=4
)
HYBRID = replace(LLAMA, pattern=("*M", "G-"), mamba=_MAMBA, delta_net=_DELTA)
# Windows shorter than the texts, and all that attention does besides.
FEATURES = replace(
    LLAMA,
    num_layers=3,
    attention=AttentionConfig(
        qk_norm="head",
        gate=True,
        sinks=True,
        softcap=3.0,
        scale=0.5,
        window=4,
        local_layers=(0, 2),
        local_rope_base=100.0,
        nope_layers=(2,),
    ),
    rope=RopeConfig(rotary_dim=6, interleaved=True, scaling="yarn", factor=2.0, original_length=8),
    norm_place="both",
    zero_centered_norm=True,
    activation="geglu_tanh",
    embedding_scale=2.0,
    residual_scale=0.5,
    logit_softcap=8.0,
)
POST_NORM = replace(
    LLAMA,
    attention=AttentionConfig(qk_norm="all", window=3),
    norm_place="post",
    residual="parallel",
    activation="squared_relu",
)
# What predicts further tokens has no part in generating.
LATENT = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=2,
    ffn_size=48,
    init_std=0.4,
    latent=LatentAttentionConfig(
        num_heads=4, kv_rank=12, q_rank=20, head_dim=8, rope_dim=6, value_dim=10
    ),
    mtp=MTPConfig(),
)
DRESSES = {"llama": LLAMA, "gpt2": GPT2, "mamba": MAMBA, "hybrid": HYBRID, "latent": LATENT}

PROMPTS = ["a", "hello", "what is this", "hi"]
DECISIVE = 1e-3
"""Logits this far apart are told apart whatever the order of additions."""


def last_logits(model: GPT, tokens: list[int]) -> Tensor:
    """The logits [V] after `tokens`, from one pass over all of them without a cache."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens], device=device))
    return logits[0, -1].float().cpu()


def greedy_without_cache(
    model: GPT, prompt: list[int], steps: int
) -> tuple[tuple[int, ...], list[float]]:
    """The greedy tokens and their log-probabilities, the whole sequence computed at every step."""
    tokens, logprobs = list(prompt), []
    for _ in range(steps):
        logits = last_logits(model, tokens)
        best, second = logits.topk(2).values.tolist()
        assert best - second > DECISIVE, "two tokens are nearly equal: a coin toss"
        tokens.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
    return tuple(tokens[len(prompt) :]), logprobs


def stored(model: GPT) -> dict[str, LayoutTensor]:
    """A model's parameters as a checkpoint has them, under `model/`."""
    specs = model.specs()
    return {
        name: LayoutTensor(p.data, specs[name].layout.renamed(lambda name: f"model/{name}"))
        for name, p in model.named_parameters()
    }


def save_checkpoint(
    model: GPT,
    directory: Path,
    *,
    step: int = 1,
    tokenizer: bool = True,
    config: ModelConfig | None = None,
    state: dict[str, Any] | None = None,
) -> Path:
    """What a training run leaves: weights under `model/`, the config, the tokenizer's folder."""
    files: dict[str, Path | bytes] = {}
    if tokenizer:
        files["tokenizer"] = directory.parent / "tokenizer"
        ByteTokenizer().save(directory.parent / "tokenizer")
    if state is None:
        state = {"config": {"model": asdict(config or model.config)}}
    return mcore_ckpt.save(directory, step=step, tensors=stored(model), state=state, files=files)
