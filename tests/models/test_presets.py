import pytest
import torch

from mcore_models import build_model, count_parameters, gpt2, llama, preset, preset_names

# Published counts: the sum of the tensors of each release (tied heads counted once).
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama3-8b-8layers": 2_795_573_248,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "tinyllama-1.1b": 1_100_048_384,
    **{"mamba2-130m": 128_989_632, "mamba2-370m": 368_346_624, "mamba2-780m": 604_431_936},
    **{"mamba2-1.3b": 1_343_757_312, "mamba2-2.7b": 2_702_599_680},
    "mamba-codestral-7b": 7_285_403_648,
    "nemotron-h-8b": 8_100_852_736,
    "qwen3-next-80b-a3b": 79_674_391_296,
}


def test_every_preset_has_a_published_count() -> None:
    assert set(PUBLISHED) == set(preset_names())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    config = preset(name)
    model = build_model(config, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert count_parameters(config).total == PUBLISHED[name]


def test_dresses() -> None:
    one = llama(vocab_size=64, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2)
    assert (one.norm, one.activation, one.position) == ("rms_norm", "swiglu", "rope")
    assert not one.linear_bias
    assert not one.tied_embeddings
    two = gpt2(vocab_size=64, hidden_size=32, num_layers=1, num_heads=4)
    assert (two.norm, two.activation, two.position) == ("layer_norm", "gelu_tanh", "learned")
    assert two.linear_bias
    assert two.tied_embeddings
    with torch.device("meta"):
        names = {name for name, _ in build_model(one).named_parameters()}
    assert "lm_head.weight" in names


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'llama-3-8b'"):
        preset("llama3-8b")
