"""StarCoder2: rotary positions with GPT-2's norms, biases and MLP."""

from collections.abc import Iterator

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.gpt2 import GELUS
from mcore_models.hf.llama import PLAIN, SIZES, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Choice, Field, Ours, with_defaults
from mcore_models.hf.windows import Windows
from mcore_parallel.mapping import Operator, Rename

_TANH_FIRST = (("gelu_pytorch_tanh", "gelu_tanh"), *GELUS)


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield from decoder_operators(model)
    for theirs, ours in {"c_fc": "up", "c_proj": "down"}.items():
        yield Rename(
            f"model.layers.{{layer}}.mlp.{theirs}.{{kind:weight|bias}}",
            f"layers.{{layer}}.mlp.{ours}.{{kind}}",
        )


STARCODER2 = Architecture(
    name="Starcoder2ForCausalLM",
    model_type="starcoder2",
    rules=(
        *with_defaults(
            SIZES, num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.018042
        ),
        Field("norm_epsilon", "norm_eps", float, default=1e-5),
        Field("use_bias", "linear_bias", bool, default=True),
        *with_defaults((TIED,), tie_word_embeddings=True),
        Choice("hidden_act", "activation", _TANH_FIRST),
        PLAIN,
        Ours("norm", "layer_norm"),
        Windows(),
        Rope(),
    ),
    operators=_operators,
)
"""`Starcoder2ForCausalLM` (Lozhkov et al., "StarCoder 2 and The Stack v2", 2024)."""
