"""Hugging Face architectures: config.json and tensor names, in both directions."""

from collections.abc import Mapping

from mcore_models.hf.architecture import Architecture
from mcore_models.hf.bert import BERT, BERT_MASKED, BERT_PRETRAINING
from mcore_models.hf.cohere import COHERE
from mcore_models.hf.compare import differences
from mcore_models.hf.deepseek import DEEPSEEK_V3, DEEPSEEK_V3_FURTHER
from mcore_models.hf.gemma import GEMMA, GEMMA2, GEMMA3
from mcore_models.hf.glm4 import GLM4_MOE, GLM4_MOE_FURTHER
from mcore_models.hf.gpt2 import GPT2
from mcore_models.hf.gpt_neox import GPT_NEOX
from mcore_models.hf.gpt_oss import GPT_OSS
from mcore_models.hf.granite import GRANITE
from mcore_models.hf.llama import DRESS, LLAMA, SIZES, decoder_operators
from mcore_models.hf.mamba2 import MAMBA2
from mcore_models.hf.mistral import MISTRAL, MIXTRAL
from mcore_models.hf.nemotron_h import NEMOTRON_H
from mcore_models.hf.olmo import OLMO2, OLMO3
from mcore_models.hf.phi3 import PHI3
from mcore_models.hf.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from mcore_models.hf.qwen3_next import QWEN3_NEXT
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import REQUIRED, Biases, Choice, Field, Only, Ours, Rule, in_force
from mcore_models.hf.smollm3 import SMOLLM3
from mcore_models.hf.starcoder2 import STARCODER2
from mcore_models.hf.t5 import T5
from mcore_models.hf.windows import Windows

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        OLMO2,
        OLMO3,
        PHI3,
        GRANITE,
        SMOLLM3,
        STARCODER2,
        COHERE,
        GPT2,
        GPT_NEOX,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        GLM4_MOE,
        GPT_OSS,
        DEEPSEEK_V3,
        MAMBA2,
        NEMOTRON_H,
        QWEN3_NEXT,
        BERT,
        BERT_MASKED,
        BERT_PRETRAINING,
        T5,
    )
}
"""The architectures that this package knows, by the name that `config.json` has for them."""

__all__ = [
    "ARCHITECTURES",
    "BERT",
    "BERT_MASKED",
    "BERT_PRETRAINING",
    "COHERE",
    "DEEPSEEK_V3",
    "DEEPSEEK_V3_FURTHER",
    "DRESS",
    "GEMMA",
    "GEMMA2",
    "GEMMA3",
    "GLM4_MOE",
    "GLM4_MOE_FURTHER",
    "GPT2",
    "GPT_NEOX",
    "GPT_OSS",
    "GRANITE",
    "LLAMA",
    "MAMBA2",
    "MISTRAL",
    "MIXTRAL",
    "NEMOTRON_H",
    "OLMO2",
    "OLMO3",
    "PHI3",
    "QWEN2",
    "QWEN2_MOE",
    "QWEN3",
    "QWEN3_MOE",
    "QWEN3_NEXT",
    "REQUIRED",
    "SIZES",
    "SMOLLM3",
    "STARCODER2",
    "T5",
    "Architecture",
    "Biases",
    "Choice",
    "Field",
    "Only",
    "Ours",
    "Rope",
    "Rule",
    "Windows",
    "decoder_operators",
    "differences",
    "in_force",
]
