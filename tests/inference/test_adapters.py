"""Generation with adapters beside the weights, as with adapters merged into them."""

import sys
from pathlib import Path

import pytest
import torch

from mcore_data import ByteTokenizer
from mcore_inference import LLM, SamplingParams
from mcore_models import ModelConfig, build_model
from mcore_models.adapters import LoRAConfig, adapters, add_lora, merge
from mcore_parallel import RngKey

sys.path.append(str(Path(__file__).parent))
from small_models import FEATURES, HYBRID, LATENT, PROMPTS, greedy_without_cache, save_checkpoint

RULES = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("config", [FEATURES, HYBRID, LATENT], ids=["features", "hybrid", "latent"])
def test_decoding_equals_the_whole_pass(config: ModelConfig, tmp_path: Path) -> None:
    """Cached keys and states are those of the adapted layers, also of latent attention."""
    model = build_model(config, key=RngKey(3)).eval()
    plain = [greedy_without_cache(model, list(x.encode()), 8)[0] for x in PROMPTS]
    add_lora(model, LoRAConfig(rank=2))
    generator = torch.Generator().manual_seed(0)
    for adapter in adapters(model).values():
        with torch.no_grad():
            adapter.b.copy_(torch.randn(adapter.b.shape, generator=generator) * 0.3)
    want = [greedy_without_cache(model, list(x.encode()), 8)[0] for x in PROMPTS]
    assert want != plain
    found = LLM(model, ByteTokenizer()).generate(PROMPTS, RULES)
    assert [done.token_ids for done in found] == want
    save_checkpoint(model, tmp_path / "apart")
    with pytest.raises(ValueError, match=r"lora_[ab]\.weight"):  # and not the base alone
        LLM.from_checkpoint(tmp_path / "apart")
    merge(model)
    save_checkpoint(model, tmp_path / "merged")
    found = LLM.from_checkpoint(tmp_path / "merged").generate(PROMPTS, RULES)
    assert [done.token_ids for done in found] == want
