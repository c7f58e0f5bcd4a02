"""Presets with latent attention, against transformers' class on meta and planning."""

from dataclasses import replace

import pytest
import torch

from mcore_models import (
    MTPConfig,
    build_model,
    count_parameters,
    flops_per_token,
    model_shape,
    preset,
)
from mcore_models.hf import DEEPSEEK_V3, differences
from mcore_models.latent_presets import LATENT_PRESETS, published_latent_configs
from mcore_parallel.cost import shape

PUBLISHED = {"deepseek-v3": 671_026_404_352, "kimi-k2": 1_026_408_209_408}
"""The sums of the tensors of each release, corrections and further predictions left out."""

ACTIVE = {"deepseek-v3": 37_552_282_624, "kimi-k2": 32_861_477_888}


@pytest.mark.parametrize("name", LATENT_PRESETS)
def test_parameters(name: str) -> None:
    config = preset(name)
    model = build_model(config, device="meta")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    count = count_parameters(config)
    assert trained == count.total == PUBLISHED[name]
    assert count.active == ACTIVE[name]
    written = DEEPSEEK_V3.write_config(config)
    assert not list(differences(DEEPSEEK_V3.read_config(written), config))


@pytest.mark.parametrize("name", LATENT_PRESETS)
def test_their_own_class_has_as_many(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    written = {**DEEPSEEK_V3.write_config(preset(name)), **published_latent_configs()[name]}
    with torch.device("meta"):
        theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**written))
    assert theirs.num_parameters() == PUBLISHED[name]


def test_planning_means_the_same_model() -> None:
    """But for where tokens may go, which a router of ours does not limit to nodes."""
    ours, planned = model_shape(preset("deepseek-v3")), shape("deepseek-v3")
    assert ours.flops_per_token(4096) == planned.flops_per_token(4096)
    corrections = 58 * 256  # planning counts them among the vectors
    assert ours.parameters == planned.parameters - corrections


def test_the_release_with_its_further_prediction() -> None:
    """685 billion with what repeats embedding and head: 14 of them in the layer beyond the last."""
    model = replace(preset("deepseek-v3"), mtp=MTPConfig())
    repeated = 2 * 129280 * 7168
    total = count_parameters(model).total
    assert round((total + repeated) / 1e9) == 685 - 1  # the release counts 8-bit scales as well
    further = flops_per_token(model, 4096) - flops_per_token(preset("deepseek-v3"), 4096)
    assert 0 < further < 0.06 * flops_per_token(model, 4096)
