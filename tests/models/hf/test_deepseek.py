"""What DeepSeek's folders have besides a model: queries without a rank, other types."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_models import GPT, build_model
from mcore_models.hf import DEEPSEEK_V3

transformers = pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parent))
from families import FAMILIES  # noqa: E402
from over_ranks import tensors_of  # noqa: E402

TOKENS = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))


def logits(model: GPT) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)


def test_queries_without_a_rank_and_halves_that_turn() -> None:
    fields = {
        **FAMILIES["deepseek-v3"][1],
        **{"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
        **{"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    }
    torch.manual_seed(0)
    theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**fields)).eval()
    config = DEEPSEEK_V3.read_config(theirs.config.to_dict())
    assert config.latent is not None
    assert config.latent.q_rank is None
    model = build_model(config).eval()
    with torch.no_grad():
        expected = theirs(TOKENS, use_cache=False).logits
        # Through a folder's names, without a folder.
        weights = theirs.state_dict()
        for layer in range(1, 2):
            fused = weights.pop(f"model.layers.{layer}.mlp.experts.gate_up_proj")
            down = weights.pop(f"model.layers.{layer}.mlp.experts.down_proj")
            for i, (both, out) in enumerate(zip(fused, down, strict=True)):
                block = f"model.layers.{layer}.mlp.experts.{i}"
                gate, up = both.chunk(2)
                weights |= {f"{block}.gate_proj.weight": gate, f"{block}.up_proj.weight": up}
                weights[f"{block}.down_proj.weight"] = out
        fill(model, weights)
    assert (logits(model) - expected).norm() < 1e-4 * expected.norm()


def fill(model: GPT, theirs: dict[str, Tensor]) -> None:
    from mcore_parallel.mapping import TensorMeta, evaluate

    metas = {name: TensorMeta(tuple(x.shape), x.dtype) for name, x in theirs.items()}
    ours = evaluate(DEEPSEEK_V3.mapping(model.config).forward(metas), theirs)
    for local in tensors_of(model).values():
        for fragment, view in local.views():
            view.copy_(ours.pop(fragment.name))
    assert not ours


def test_a_folder_keeps_its_own_type() -> None:
    """Kimi K2 has DeepSeek's class and a type of its own."""
    config = DEEPSEEK_V3.write_config(
        DEEPSEEK_V3.read_config({**FAMILIES["deepseek-v3"][1]}), {"model_type": "kimi_k2"}
    )
    assert config["model_type"] == "kimi_k2"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first_k_dense_replace": 4}, "first_k_dense_replace=4 leaves none.*at most 3"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"q_lora_rank": 2.5}, "q_lora_rank=2.5 must be of type int"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DEEPSEEK_V3.read_config({**FAMILIES["deepseek-v3"][1], **fields})
