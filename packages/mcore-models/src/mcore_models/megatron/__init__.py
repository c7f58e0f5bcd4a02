"""Models that Megatron-LM has trained: its stored arguments and its tensors' names."""

from mcore_models.megatron.family import GPT, MegatronGPT

__all__ = ["GPT", "MegatronGPT"]
