"""An encoder-decoder writes with its cache what it writes without."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_data import ByteTokenizer
from mcore_inference import LLM, SamplingParams
from mcore_inference.engine import Engine
from mcore_inference.request import Request
from mcore_inference.runner import ModelRunner
from mcore_inference.source import generation_start
from mcore_models import T5, AttentionConfig, ModelConfig, T5Config, build_model
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool

CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    head_dim=8,
    ffn_size=40,
    position="none",
    activation="relu",
    init_std=0.5,
    attention=AttentionConfig(scale=1.0),
    t5=T5Config(num_decoder_layers=3, num_buckets=8, max_distance=9),
)
START = 7
SOURCES = ((5, 9, 2, 44, 299), (1,), (8, 8, 250, 3, 17, 4, 90, 11, 12, 60, 61, 62), (3, 2))


def model_of(layout: str = "tp=1") -> T5:
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    model = build_model(CONFIG, mesh, dtype=torch.float64).eval()
    assert isinstance(model, T5)
    return model


def without_cache(model: T5, source: tuple[int, ...], steps: int) -> tuple[list[int], list[float]]:
    """The most probable tokens, each by a pass over everything, and their log-probabilities."""
    written, found = [START], []
    for _ in range(steps):
        with torch.no_grad():
            logits = model(torch.tensor([written]), source=torch.tensor([source]))[0, -1]
        written.append(int(logits.argmax()))
        found.append(float(logits.log_softmax(-1).max()))
    return written[1:], found


def requests(steps: int) -> list[Request]:
    params = SamplingParams(max_tokens=steps, temperature=0)
    counts = [steps - i for i in range(len(SOURCES))]  # they leave one after another
    return [
        Request(prompt=source, params=replace(params, max_tokens=count))
        for source, count in zip(SOURCES, counts, strict=True)
    ]


@pytest.mark.parametrize("together", [1, 2, 64])
def test_with_a_cache_as_without(together: int) -> None:
    """Requests join when others leave; each reads its source once, whatever the others do."""
    model = model_of()
    asked = requests(12)
    engine = Engine(ModelRunner(model, start_id=START), max_sequences=together)
    engine.run(asked)
    for request in asked:
        tokens, logprobs = without_cache(model, request.prompt, request.params.max_tokens)
        assert request.tokens == tokens
        assert request.logprobs == pytest.approx(logprobs, abs=1e-5)
    assert len({tuple(request.tokens[:3]) for request in asked}) > 1
    assert engine._cache.num_slots == 0


def generated(layout: str) -> list[list[int]]:
    asked = requests(6)
    Engine(ModelRunner(model_of(layout), start_id=START)).run(asked)
    return [request.tokens for request in asked]


def test_cut_over_ranks_it_writes_the_same(ranks: RankPool) -> None:
    assert ranks.run(generated, 2, "tp=2") == [generated("tp=1")] * 2


def test_texts_are_read_and_not_continued(tmp_path: Path) -> None:
    """An answer is the text of the new tokens alone; sources of text end as the training's did."""
    tokenizer = ByteTokenizer()
    llm = LLM(model_of().float(), tokenizer, start_id=START)
    (found,) = llm.generate("abc", SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    assert list(found.prompt_token_ids) == [*tokenizer.encode("abc"), *ends]
    assert len(found.token_ids) == 9
    (tmp_path / "config.json").write_text('{"decoder_start_token_id": 7}')
    assert generation_start(tmp_path) == START
    assert generation_start(tmp_path / "none") == 0
    with pytest.raises(ValueError, match="reads a prompt by its encoder"):
        llm.generate("abc", SamplingParams(prompt_logprobs=True))
    with pytest.raises(ValueError, match=r"start_id=300 is outside .* 0 to 299"):
        ModelRunner(llm.model, start_id=300)
