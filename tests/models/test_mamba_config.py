"""What a Mamba-2 model costs, and configurations and layouts that are refused."""

from dataclasses import replace

import pytest
import torch

from mcore_models import (
    MambaConfig,
    ModelConfig,
    MoEConfig,
    build_model,
    check_layout,
    count_parameters,
    flops_of_documents,
    flops_per_token,
    llama,
)
from mcore_models.common import Mamba2
from mcore_parallel import ParallelConfig

MAMBA = MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2)
PURE = ModelConfig(vocab_size=37, hidden_size=32, num_layers=2, mamba=MAMBA)
HYBRID = replace(
    llama(vocab_size=37, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2),
    pattern=("M-", "*-", "M."),
    mamba=MAMBA,
)
MOE = MoEConfig(num_experts=4, top_k=2, expert_ffn_size=12)


def with_mamba(config: ModelConfig, **changes: object) -> ModelConfig:
    return replace(config, mamba=replace(MAMBA, **changes))  # type: ignore[arg-type]


# --- accounting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        PURE,
        HYBRID,
        with_mamba(HYBRID, num_groups=1, projection_bias=True, conv_bias=False),
        replace(HYBRID, pattern=("ME", "*-", "M-"), moe=MOE),
    ],
)
def test_the_formula_counts_the_built_model(config: ModelConfig) -> None:
    model = build_model(config, device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    count = count_parameters(config)
    assert count.total == sum(sizes.values())
    linear = [n for n in sizes if n.endswith(".weight") and "conv" not in n and "norm" not in n]
    assert count.matmul == sum(sizes[n] for n in linear if "embedding" not in n)


def test_a_published_model_has_its_number_of_parameters() -> None:
    """Mamba-2 130M, and the same by transformers' own class."""
    mamba = MambaConfig(num_heads=24, head_dim=64, state_size=128)
    config = ModelConfig(
        vocab_size=50288, hidden_size=768, num_layers=24, mamba=mamba, tied_embeddings=True
    )
    assert count_parameters(config).total == 128_989_632
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        theirs = transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(
                vocab_size=50288, hidden_size=768, num_hidden_layers=24, num_heads=24, n_groups=1,
                tie_word_embeddings=True,
            )
        )  # fmt: skip
    assert sum(parameter.numel() for parameter in theirs.parameters()) == 128_989_632


def test_flops_are_those_of_the_recurrence() -> None:
    """Per token and layer: products, then 5 for each number of a state and 2 for each tap."""
    scan, conv = 5 * 32 * 6, 2 * 4 * (32 + 2 * 2 * 6)
    products = 2 * count_parameters(PURE).matmul
    assert flops_per_token(PURE, 64) == 3 * (products + 2 * (scan + conv))
    assert flops_per_token(PURE, 64) == flops_per_token(PURE, 10_000)
    assert flops_of_documents(PURE, [5, 7]) == 12 * flops_per_token(PURE, 1)
    attention = flops_per_token(HYBRID, 64) - flops_per_token(HYBRID, 0)
    assert attention == 6 * 64 * 32


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(tp=3), r"mamba\.num_heads=8 cannot be cut over tp=3: use tp=2 or 4"),
        (ParallelConfig(tp=16), r"mamba\.num_heads=8 cannot be cut over tp=16: use tp=8"),
        (
            ParallelConfig(cp=16),
            r"cp=16: Mamba-2's 8 heads and 2 groups \(of tp=1\) cannot be dealt out over 16 ranks: "
            r"use 8",
        ),
        (ParallelConfig(cp=8, tp=2), r"cp=8: Mamba-2's 4 heads and 1 groups .* 8 ranks: use 4"),
    ],
)
def test_layouts_that_cannot_carry_it(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_layout(PURE, parallel)
    check_layout(PURE, ParallelConfig(cp=8))
    check_layout(HYBRID, ParallelConfig(cp=4, tp=2))


def test_groups_that_ranks_can_neither_share_nor_divide() -> None:
    config = with_mamba(PURE, num_heads=12, num_groups=3)
    with pytest.raises(ValueError, match=r"mamba\.num_groups=3 cannot be cut over tp=2: use tp=1"):
        check_layout(config, ParallelConfig(tp=2))
    check_layout(config, ParallelConfig(tp=3))
    check_layout(config, ParallelConfig(tp=6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 3}, "num_heads=8 is not a multiple of num_groups=3: use num_groups 2 or 4"),
        ({"state_size": 0}, "state_size=0 must be a whole number of at least 1"),
        ({"dt_min": 0.5, "dt_max": 0.1}, "dt_min=0.5 and dt_max=0.1 must rise from at least 0"),
        ({"dt_init_min": 0.0}, "dt_init_min=0.0 and dt_init_max=0.1 must rise from more than 0"),
        ({"a_init_max": float("inf")}, "a_init_min=1.0 and a_init_max=inf must rise .* finite"),
    ],
)
def test_errors_name_the_numbers(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MAMBA, **changes)  # type: ignore[arg-type]


def test_the_pattern_and_what_it_needs() -> None:
    assert PURE.layer_pattern == ("M.", "M.")
    assert replace(PURE, pattern="M- M.").layer_pattern == ("M-", "M.")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer 1 asks for 'M' and mamba is not set"):
        replace(HYBRID, mamba=None, pattern=("*-", "M-", "*-"))
    with pytest.raises(ValueError, match="mamba is set and no layer of the pattern has 'M'"):
        replace(HYBRID, pattern=None)
    with pytest.raises(ValueError, match="layer 1 asks for '\\*', attention, and num_heads is 0"):
        replace(PURE, pattern=("M.", "*-"))
    with pytest.raises(ValueError, match="head_dim=16 describes attention, of which num_heads=0"):
        replace(PURE, head_dim=16)
    with pytest.raises(ValueError, match="num_heads=-1 must be a whole number"):
        replace(PURE, num_heads=-1)


def test_a_model_without_heads_needs_none_of_attention() -> None:
    assert (PURE.num_heads, PURE.kv_heads, PURE.head_size) == (0, 0, 0)
    model = build_model(PURE)
    assert model.kernels.target.head_dim is None
    assert isinstance(model.get_submodule("layers.0.mamba"), Mamba2)
