from typing import Any

import pytest
import torch

from mcore_models import build_model, count_parameters, gpt2, llama, preset, preset_names
from mcore_models.attention_presets import published_configs
from mcore_models.encoder_presets import ENCODER_PRESETS
from mcore_models.hf import ARCHITECTURES, Architecture, differences
from mcore_models.latent_presets import LATENT_PRESETS

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

# Of models whose configurations are those of transformers' classes, with the layers as published.
ATTENTION = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "smollm3-3b": 3_075_098_624,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.5": 352_797_814_784,
}


def test_every_preset_has_a_published_count() -> None:
    assert {*PUBLISHED, *ATTENTION, *LATENT_PRESETS, *ENCODER_PRESETS} == set(preset_names())
    assert set(ATTENTION) == {name for name, _, _ in published_configs()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    config = preset(name)
    model = build_model(config, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert count_parameters(config).total == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "architecture", "config"),
    [pytest.param(*row, id=row[0]) for row in published_configs()],
)
def test_parameters_are_those_of_transformers(
    name: str, architecture: Architecture, config: dict[str, Any]
) -> None:
    """Of its own class of the same config, on meta; and what it says of the preset in our words."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, architecture.name)
    with torch.device("meta"):
        theirs = kind(kind.config_class(**config))
    assert theirs.num_parameters() == count_parameters(preset(name)).total == ATTENTION[name]
    written = architecture.write_config(preset(name))
    assert not list(differences(architecture.read_config(written), preset(name)))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.startswith("llama3-8b")])
def test_their_own_class_has_as_many(name: str) -> None:
    """The class to whose words an architecture turns the preset, on meta."""
    transformers = pytest.importorskip("transformers")
    model = preset(name)
    for architecture in ARCHITECTURES.values():
        try:
            written = architecture.write_config(model)
        except ValueError:
            continue
        break
    kind = getattr(transformers, architecture.name)
    with torch.device("meta"):
        theirs = kind(kind.config_class(**written))
    assert theirs.num_parameters() == PUBLISHED[name]


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_an_architecture_expresses_a_preset_or_says_why_not(architecture: Architecture) -> None:
    """Whatever parts it has; and what is written, beside nothing, is the same model."""
    for model in map(preset, preset_names()):
        refusal = None
        try:
            written = architecture.write_config(model)
        except ValueError as error:
            refusal = str(error)
        if refusal is None:
            assert not list(differences(architecture.read_config(written), model))
        else:
            assert refusal.startswith(f"{architecture.name} cannot express")
            assert "\n" not in refusal


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
