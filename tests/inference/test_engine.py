"""Requests that run together, join and leave: each gets what it would get alone, without cache."""

import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from mcore_data import ByteTokenizer
from mcore_inference import Engine, ModelRunner, Request, SamplingParams, TextStream, sample
from mcore_models import GPT, build_model
from mcore_parallel import ParallelConfig, ParallelMesh

sys.path.append(str(Path(__file__).parent))
from small_models import (
    DRESSES,
    GPT2,
    LLAMA,
    POSITIONS,
    PROMPTS,
    VOCABULARY,
    greedy_without_cache,
    last_logits,
)

STEPS = 10
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def model_of(dress: str, device: str = "cpu") -> GPT:
    return build_model(DRESSES[dress], ParallelMesh.single(device)).eval()


def request(prompt: str | list[int], **params: object) -> Request:
    tokens = ByteTokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    rules = SamplingParams(**{"max_tokens": STEPS, **params})  # type: ignore[arg-type]
    return Request(prompt=tuple(tokens), params=rules)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dress", DRESSES)
def test_greedy_equals_recomputing_everything_alone_and_together(dress: str, device: str) -> None:
    model = model_of(dress, device)
    engine = Engine(ModelRunner(model))
    together = [request(prompt) for prompt in PROMPTS]
    engine.run(together)
    for prompt, got in zip(PROMPTS, together, strict=True):
        tokens, logprobs = greedy_without_cache(model, list(got.prompt), STEPS)
        alone = request(prompt)
        engine.run([alone])
        assert tuple(got.tokens) == tuple(alone.tokens) == tokens
        assert len(set(tokens)) > 2  # it does not just repeat one token
        assert got.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert alone.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 100), (2, 100), (3, 6), (64, 1)])
def test_limits_change_when_a_request_runs_and_not_what_it_gets(
    sequences: int, tokens: int
) -> None:
    model = model_of("llama")
    free = [request(p, max_tokens=3 + i) for i, p in enumerate(PROMPTS)]
    Engine(ModelRunner(model)).run(free)
    bounded = [request(p, max_tokens=3 + i) for i, p in enumerate(PROMPTS)]
    engine = Engine(ModelRunner(model), max_sequences=sequences, max_batch_tokens=tokens)
    engine.run(bounded)
    assert [r.tokens for r in bounded] == [r.tokens for r in free]


@pytest.mark.parametrize("dress", ["gpt2", "mamba", "hybrid"])
def test_requests_join_and_leave_between_steps(dress: str) -> None:
    model = model_of(dress)
    expected = {p: greedy_without_cache(model, ByteTokenizer().encode(p), 8)[0] for p in PROMPTS}
    engine = Engine(ModelRunner(model))
    arriving = [request(p, max_tokens=8) for p in PROMPTS]
    dropped = request("dropped", max_tokens=12)
    engine.add(dropped)
    finished: list[Request] = []
    waiting = iter(arriving)
    for step in itertools.count():
        if step % 3 == 0 and (joining := next(waiting, None)):
            engine.add(joining)
        if step == 4:
            engine.abort([dropped])
        done = engine.step()
        finished += done
        if step > 4 and not done and len(finished) == len(arriving):
            break
    assert finished == arriving  # in the order in which they came
    for prompt, got in zip(PROMPTS, arriving, strict=True):
        assert tuple(got.tokens) == expected[prompt]
    assert dropped.finish_reason is None
    assert len(dropped.tokens) == 4
    assert engine.step() == []


def test_a_sample_is_a_function_of_the_seed_and_not_of_the_batch() -> None:
    model = model_of("llama")
    engine = Engine(ModelRunner(model))

    def drawn(*seeds: int) -> list[list[int]]:
        rules = {"temperature": 1.5, "top_k": 50, "top_p": 0.95}
        batch = [request("hello", seed=seed, **rules) for seed in seeds]
        others = [request(p, temperature=0.5 * i, seed=9) for i, p in enumerate(PROMPTS)]
        engine.run([*others[:2], *batch, *others[2:]] if len(seeds) > 1 else batch)
        return [r.tokens for r in batch]

    together = drawn(1, 2, 3, 1)
    tokens = ByteTokenizer().encode("hello")
    params = SamplingParams(temperature=1.5, top_k=50, top_p=0.95, seed=1)
    for position, token in enumerate(together[0]):
        logits = last_logits(model, tokens)[None]
        assert sample(logits, [params], [position]).tolist() == [token]
        tokens.append(token)
    assert together == [drawn(seed)[0] for seed in (1, 2, 3, 1)]
    assert together[0] == together[3]
    assert len({tuple(tokens) for tokens in together}) == 3


def test_the_end_is_where_the_request_says() -> None:
    model = model_of("llama")
    engine = Engine(ModelRunner(model))
    plain = request("hello")
    engine.run([plain])
    third = plain.tokens[2]
    assert third not in plain.tokens[:2]

    def ending(ends: set[int], **params: object) -> Request:
        tokens = tuple(ByteTokenizer().encode("hello"))
        rules = SamplingParams(**{"max_tokens": STEPS, **params})  # type: ignore[arg-type]
        got = Request(prompt=tokens, params=rules, end_ids=frozenset(ends))
        engine.run([got])
        return got

    for stopped in (ending({third}), ending(set(), stop_token_ids=[third])):
        assert stopped.tokens == plain.tokens[:3]
        assert stopped.text_tokens == plain.tokens[:2]
        assert len(stopped.logprobs) == 3
        assert stopped.finish_reason == "stop"
    ignoring = ending({third}, ignore_eos=True)
    assert (ignoring.tokens, ignoring.finish_reason) == (plain.tokens, "length")
    assert ignoring.text_tokens == plain.tokens
    # The end token in the last place that max_tokens leaves is still the end of the text.
    assert ending({third}, max_tokens=3).finish_reason == "stop"
    assert ending({third}, max_tokens=2).finish_reason == "length"
    nothing = ending({third}, max_tokens=0)
    assert (nothing.tokens, nothing.logprobs, nothing.finish_reason) == ([], [], "length")


def test_only_tokens_of_the_tokenizer_are_sampled_but_logprobs_are_the_models() -> None:
    model = model_of("llama")
    few = 5
    engine = Engine(ModelRunner(model), vocab_size=few)
    for temperature in (0.0, 3.0):
        got = request("hello", temperature=temperature)
        engine.run([got])
        assert set(got.tokens) <= set(range(few))
        assert max(got.logprobs) < -1  # most of the probability lies beyond
        row = last_logits(model, [*got.prompt, *got.tokens[:-1]]).log_softmax(-1)
        assert got.logprobs[-1] == pytest.approx(float(row[got.tokens[-1]]), abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dress", DRESSES)
def test_the_probabilities_of_a_prompt_are_the_models(dress: str, device: str) -> None:
    """U53: of every prompt token after the first, beside requests that do not ask for them."""
    model = model_of(dress, device)
    engine = Engine(ModelRunner(model))
    rules = {"prompt_logprobs": True, "top_logprobs": 3}
    plain = [request(prompt) for prompt in PROMPTS]
    asking = [request(p, **rules, max_tokens=n) for n, p in enumerate(PROMPTS)]
    engine.run([asking[0], plain[0], asking[1], asking[2], *plain[1:], asking[3]])
    for got, beside in zip(asking, plain, strict=True):
        assert got.tokens == beside.tokens[: got.params.max_tokens]
        assert beside.prompt_logprobs == beside.prompt_top_logprobs == []
        assert beside.top_logprobs == [()] * STEPS
        assert got.finish_reason == "length"
        rows = [last_logits(model, list(got.prompt[:n])) for n in range(1, len(got.prompt))]
        rows += [last_logits(model, [*got.prompt, *got.tokens[:n]]) for n in range(len(got.tokens))]
        wide = [row.log_softmax(-1).tolist() for row in rows]
        own = [*got.prompt[1:], *got.tokens]
        expected = [row[token] for row, token in zip(wide, own, strict=True)]
        assert [*got.prompt_logprobs, *got.logprobs] == pytest.approx(expected, abs=1e-4)
        for row, top in zip(wide, [*got.prompt_top_logprobs, *got.top_logprobs], strict=True):
            assert [p for _, p in top] == pytest.approx(sorted(row)[:-4:-1], abs=1e-4)
            assert [row[token] for token, _ in top] == pytest.approx([p for _, p in top], abs=1e-4)


def test_a_prompt_is_scored_without_generating(monkeypatch: pytest.MonkeyPatch) -> None:
    """U53: max_tokens 0 still reports the prompt; one token alone needs no model at all."""
    engine = Engine(ModelRunner(model_of("gpt2")))
    got = request("hello", prompt_logprobs=True, max_tokens=0)
    assert got.finish_reason is None
    engine.run([got])
    assert (got.tokens, got.finish_reason, len(got.prompt_logprobs)) == ([], "length", 4)
    assert engine._cache.num_slots == 0
    monkeypatch.setattr(engine, "runner", None)
    one = request("h", prompt_logprobs=True, max_tokens=0)
    assert (one.finish_reason, one.prompt_logprobs) == ("length", [])


def test_the_most_probable_tokens_are_those_that_can_be_sampled() -> None:
    model = model_of("llama")
    few = 5
    got = request("hello", top_logprobs=9, prompt_logprobs=True)
    Engine(ModelRunner(model), vocab_size=few).run([got])
    for top in (*got.top_logprobs, *got.prompt_top_logprobs):
        assert {token for token, _ in top} == set(range(few))
    for token, top in zip(got.tokens, got.top_logprobs, strict=True):
        assert top[0] == (token, pytest.approx(got.logprobs[got.top_logprobs.index(top)]))


def test_a_stop_string_ends_a_request_and_frees_its_place() -> None:
    """U52: also in the middle of a token's text, and in the last place that max_tokens leaves."""
    model = model_of("llama")
    engine = Engine(ModelRunner(model), max_sequences=1)
    prompt = tuple(ByteTokenizer().encode("hello"))
    plain = request("hello")
    engine.run([plain])
    names = {token: f"<{token}>" for token in plain.tokens}

    class Names(ByteTokenizer):
        def decode(self, ids: Iterable[int]) -> str:
            return "".join(names.get(i, "") for i in ids)

    third = names[plain.tokens[2]]
    assert plain.tokens.index(plain.tokens[2]) == 2
    for stop, max_tokens in ((third, 9), (third[:2], 9), (f">{third}", 3)):
        params = SamplingParams(max_tokens=max_tokens, stop=stop)
        text = TextStream(Names(), prompt, params.stop)
        got = Request(prompt=prompt, params=params, text=text)
        after = request("hi", max_tokens=1)
        engine.run([got, after])
        assert (got.tokens, got.finish_reason) == (plain.tokens[:3], "stop")
        whole = "".join(names[token] for token in plain.tokens[:3])
        assert text.text == whole[: whole.index(stop)]
        assert after.finish_reason == "length"


def test_requests_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^n=2: a request is one sample"):
        request("a", n=2)
    with pytest.raises(ValueError, match=r"^stop=\('x',\) needs the text of the request$"):
        request("a", stop="x")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_and_leave_a_clean_engine(bad: float) -> None:
    model = model_of("llama")
    engine = Engine(ModelRunner(model))
    good = request("hello")
    engine.run([good])
    weight = model.get_parameter("lm_head.weight").data
    value = weight[7, 3].item()
    weight[7, 3] = bad
    with pytest.raises(FloatingPointError, match=r"after 5 tokens are not finite \(largest: "):
        engine.run([request("hello"), request("hi", temperature=1.0)])
    assert engine.step() == []  # nothing is left running or waiting
    engine.add(request("hello"))
    with pytest.raises(FloatingPointError):
        engine.step()
    assert engine.step() == []
    weight[7, 3] = value
    again = request("hello")
    engine.run([again])
    assert again.tokens == good.tokens


def test_memory_of_finished_requests_is_given_back() -> None:
    engine = Engine(ModelRunner(model_of("llama")), max_sequences=2)
    sizes = []
    for request_ in [request("hello", max_tokens=6) for _ in range(6)]:
        engine.add(request_)
    while engine.step() or engine._cache.num_slots:
        sizes.append(engine._cache.num_slots)
    assert max(sizes) == 2 * 10  # two requests of 5 + 6 - 1 tokens, not six
    assert not engine._cache._layers


def test_a_prompt_may_fill_the_learned_positions_to_the_last() -> None:
    model = model_of("gpt2")
    engine = Engine(ModelRunner(model))
    prompt = list(range(1, 1 + POSITIONS - 3))
    got = request(prompt, max_tokens=4)  # the fourth is never read
    engine.run([got])
    assert tuple(got.tokens) == greedy_without_cache(model, prompt, 4)[0]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "the prompt is empty: give at least one token"),
        (
            [1, VOCABULARY],
            4,
            f"token {VOCABULARY} at place 1 of the prompt is outside the model's vocabulary: "
            f"0 to {VOCABULARY - 1}",
        ),
        ([-1], 4, "token -1 at place 0 of the prompt is outside the model's vocabulary: 0 to 256"),
        (
            [1] * 20,
            6,
            "a prompt of 20 tokens and max_tokens=6 do not fit the model's 24 positions: "
            "use max_tokens 5 or less",
        ),
        (
            [1] * 30,
            0,
            "a prompt of 30 tokens and max_tokens=0 do not fit the model's 24 positions: "
            "use 24 prompt tokens or less",
        ),
    ],
)
def test_requests_that_cannot_run_are_refused_before_anything_runs(
    prompt: list[int], max_tokens: int, message: str
) -> None:
    engine = Engine(ModelRunner(model_of("gpt2")))
    bad = request(prompt, max_tokens=max_tokens)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        engine.add(bad)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        engine.run([bad])
    good = request("hello")
    with pytest.raises(ValueError, match=f"^prompt 2 of 2: {re.escape(message)}$"):
        engine.run([good, bad])
    assert good.tokens == []
    assert engine.step() == []


def test_rotary_positions_have_no_limit() -> None:
    assert LLAMA.position == "rope"
    engine = Engine(ModelRunner(model_of("llama")))
    engine.check(request([1] * 10, max_tokens=10 * LLAMA.max_positions))


@pytest.mark.parametrize(
    ("layout", "degree"),
    [
        (ParallelConfig(pp=2), "pp=2"),
        (ParallelConfig(tp=2, sequence_parallel=True), "sp"),
    ],
)
def test_layouts_that_generation_does_not_run_with_are_refused(
    layout: ParallelConfig, degree: str
) -> None:
    mesh = ParallelMesh.arithmetic(layout, world_size=2, rank=0)
    model = build_model(GPT2, mesh, device="meta")
    with pytest.raises(ValueError, match=f"generation runs on tp and dp alone, not on .*{degree}"):
        ModelRunner(model)


@pytest.mark.parametrize("limit", ["max_sequences", "max_batch_tokens"])
def test_limits_are_positive(limit: str) -> None:
    with pytest.raises(ValueError, match=f"{limit}=0 must be at least 1"):
        Engine(ModelRunner(model_of("gpt2")), **{limit: 0})
