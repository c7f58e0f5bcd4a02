"""Generation from mcore checkpoints: cache, sampler, engine and the LLM object."""

from mcore_inference.async_engine import (
    AsyncEngine,
    Chunk,
    DrainingError,
    EngineClosedError,
    Generation,
    GenerationError,
    QueueFullError,
)
from mcore_inference.cache import ContiguousCache
from mcore_inference.engine import Engine
from mcore_inference.llm import LLM, Prompt, load_weights
from mcore_inference.output import completion
from mcore_inference.paired import PairedCache
from mcore_inference.request import Completion, FinishReason, Request
from mcore_inference.runner import ModelRunner
from mcore_inference.sampling import (
    SamplingParams,
    allowed_probabilities,
    draw,
    greedy,
    log_probabilities,
    sample,
    top_log_probabilities,
)
from mcore_inference.scheduler import Scheduler
from mcore_inference.text import TextStream, continuation
from mcore_inference.weights import WeightLink, model_tensors

__all__ = [
    "LLM",
    "AsyncEngine",
    "Chunk",
    "Completion",
    "ContiguousCache",
    "DrainingError",
    "Engine",
    "EngineClosedError",
    "FinishReason",
    "Generation",
    "GenerationError",
    "ModelRunner",
    "PairedCache",
    "Prompt",
    "QueueFullError",
    "Request",
    "SamplingParams",
    "Scheduler",
    "TextStream",
    "WeightLink",
    "allowed_probabilities",
    "completion",
    "continuation",
    "draw",
    "greedy",
    "load_weights",
    "log_probabilities",
    "model_tensors",
    "sample",
    "top_log_probabilities",
]
