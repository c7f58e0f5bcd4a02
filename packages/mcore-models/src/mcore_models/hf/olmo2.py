"""OLMo 2: norms of outputs, not of inputs, and of all queries and keys of a token together."""

from collections.abc import Iterator

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import DRESS, SIZES, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Ours, with_defaults
from mcore_parallel.mapping import Operator

_NORMS = {
    "post_attention_layernorm": "mixer_out_norm",
    "post_feedforward_layernorm": "feed_forward_out_norm",
}


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield from decoder_operators(model, _NORMS)


OLMO2 = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    rules=(
        *SIZES,
        *with_defaults(DRESS, rms_norm_eps=1e-5),
        TIED,
        Biases(),
        Ours("norm_place", "post"),
        Ours("attention.qk_norm", "all"),
        Rope(),
    ),
    operators=_operators,
)
"""`Olmo2ForCausalLM` (OLMo Team, "2 OLMo 2 Furious", 2024)."""
