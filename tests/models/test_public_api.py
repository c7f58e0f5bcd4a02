import inspect

import mcore_models

PUBLIC = """
AttentionConfig AuxiliaryLosses Bert BertConfig BuildContext Builder DeltaNetConfig GPT GlobalCounts
KVCache LatentAttentionConfig MTPConfig MambaConfig MoEConfig ModelConfig ParameterCount Replacement
RopeConfig T5 T5Config TokenBatch TokenContext
build_model check_layout count_parameters flops_of_documents flops_per_token flops_utilization
freeze gpt2 import_builders llama model_shape preset preset_names
"""


def test_public_names_change_only_on_purpose() -> None:
    assert sorted(mcore_models.__all__) == sorted(PUBLIC.split())
    for name in mcore_models.__all__:
        assert inspect.getdoc(getattr(mcore_models, name)), name


def test_signature_of_build_model_changes_only_on_purpose() -> None:
    parameters = inspect.signature(mcore_models.build_model).parameters
    assert list(parameters) == [
        "config",
        "mesh",
        "kernels",
        "dtype",
        "device",
        "builders",
        "key",
        "stage_layers",
        "recompute",
        "replacements",
    ]
