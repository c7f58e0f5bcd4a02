"""Published encoders against the classes of transformers, without memory for any weight."""

import pytest
import torch

from mcore_models import build_model, count_parameters, preset
from mcore_models.encoder_presets import ENCODER_PRESETS
from mcore_models.hf import BERT_PRETRAINING, T5, differences

PUBLISHED = {
    "bert-base-uncased": 110_106_428,
    "bert-base-cased": 108_932_934,
    "bert-large-uncased": 336_226_108,
    "bert-large-cased": 334_661_958,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
}


def test_every_preset_is_here() -> None:
    assert PUBLISHED.keys() == ENCODER_PRESETS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_number_of_parameters(name: str) -> None:
    """By formula and of the model as built; of T5 1.1 theirs has the head that it is published with
    (transformers ties it)."""
    config = preset(name)
    model = build_model(config, device="meta")
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert count_parameters(config).total == sum(sizes) == PUBLISHED[name]
    assert model.specs().keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_class_of_transformers_has_as_many(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = preset(name)
    architecture = T5 if config.family == "t5" else BERT_PRETRAINING
    written = architecture.write_config(config)
    assert not list(differences(architecture.read_config(written), config))
    options = transformers.AutoConfig.for_model(**written)
    with torch.device("meta"):
        theirs = getattr(transformers, architecture.name)(options)
    head = 0
    if config.family == "t5" and not config.tied_embeddings:
        head = config.vocab_size * config.hidden_size
    assert theirs.num_parameters() + head == PUBLISHED[name]
