"""Generation from mcore checkpoints: cache, sampler, engine and the LLM object."""

from mcore_inference.cache import ContiguousCache
from mcore_inference.engine import Engine
from mcore_inference.llm import LLM, load_weights
from mcore_inference.request import Completion, FinishReason, Request
from mcore_inference.runner import ModelRunner
from mcore_inference.sampling import SamplingParams, allowed_probabilities, greedy, sample

__all__ = [
    "LLM",
    "Completion",
    "ContiguousCache",
    "Engine",
    "FinishReason",
    "ModelRunner",
    "Request",
    "SamplingParams",
    "allowed_probabilities",
    "greedy",
    "load_weights",
    "sample",
]
