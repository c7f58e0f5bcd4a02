import inspect

import mcore_inference

PUBLIC = """
AsyncEngine Chunk DrainingError EngineClosedError Generation GenerationError QueueFullError
LLM Completion ContiguousCache Engine FinishReason ModelRunner PairedCache Prompt Request
SamplingParams Scheduler TextStream WeightLink allowed_probabilities completion continuation draw
greedy load_weights log_probabilities model_tensors sample top_log_probabilities
"""


def test_public_names_change_only_on_purpose() -> None:
    assert sorted(mcore_inference.__all__) == sorted(PUBLIC.split())
    for name in mcore_inference.__all__:
        value = getattr(mcore_inference, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_signatures_change_only_on_purpose() -> None:
    def names(function: object) -> list[str]:
        return list(inspect.signature(function).parameters)  # type: ignore[arg-type]

    limits = ["max_sequences", "max_batch_tokens"]
    assert names(mcore_inference.LLM) == [
        "model",
        "tokenizer",
        "chat_template",
        "end_ids",
        "start_id",
        *limits,
    ]
    assert names(mcore_inference.LLM.from_hf) == [
        "folder",
        "tokenizer",
        "chat_template",
        "mesh",
        "dtype",
        "kernels",
        "architectures",
        *limits,
    ]
    assert names(mcore_inference.LLM.from_checkpoint) == [
        "path",
        "tokenizer",
        "chat_template",
        "mesh",
        "dtype",
        "kernels",
        "builders",
        *limits,
    ]
    assert names(mcore_inference.LLM.generate) == ["self", "prompts", "params"]
    assert names(mcore_inference.SamplingParams) == [
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "stop_token_ids",
        "ignore_eos",
        "stop",
        "n",
        "top_logprobs",
        "prompt_logprobs",
    ]
