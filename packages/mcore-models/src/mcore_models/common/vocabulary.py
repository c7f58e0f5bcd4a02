"""The two ends of a model that know its vocabulary: the table of tokens and the head."""

from mcore_models.common.builder import BuildContext
from mcore_models.config import ModelConfig
from mcore_parallel import Init
from mcore_parallel.tensor import VocabParallelEmbedding, VocabParallelHead


def build_token_embedding(config: ModelConfig, build: BuildContext) -> VocabParallelEmbedding:
    """The table of tokens, its rows cut over the tensor-parallel group."""
    return VocabParallelEmbedding(
        config.vocab_size,
        config.hidden_size,
        group=build.tp,
        sequence_parallel=build.sequence_parallel,
        accumulate=not config.tied_embeddings,
        init=Init(kind="normal", std=config.init_std),
        device=build.device,
        dtype=build.dtype,
    )


def build_head(config: ModelConfig, build: BuildContext) -> VocabParallelHead:
    """The head over the vocabulary, cut likewise; it has no weight where it is tied."""
    return VocabParallelHead(
        config.hidden_size,
        config.vocab_size,
        group=build.tp,
        tied=config.tied_embeddings,
        sequence_parallel=build.sequence_parallel,
        linear=build.kernels.linear,
        init=Init(kind="normal", std=config.init_std),
        device=build.device,
        dtype=build.dtype,
    )
