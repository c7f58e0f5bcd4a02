"""Coroutines and the engine's thread: everybody gets what is theirs, and nothing is left over."""

import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from mcore_data import ByteTokenizer
from mcore_inference import (
    LLM,
    AsyncEngine,
    Chunk,
    DrainingError,
    EngineClosedError,
    Generation,
    GenerationError,
    QueueFullError,
    Request,
    SamplingParams,
)
from mcore_models import build_model
from mcore_parallel import RngKey

sys.path.append(str(Path(__file__).parent))
from scripted import Pieces, ScriptedRunner, scripted
from small_models import LLAMA, PROMPTS

WORDS = Pieces("<", "one ", "two ", "three ", "four ", "")


def request(llm: LLM, *prompt: int, stop: tuple[str, ...] = (), tokens: int = 4) -> Request:
    return llm.request(prompt, SamplingParams(max_tokens=tokens, stop=stop), follow=True)


def counting(**limits: int) -> tuple[LLM, ScriptedRunner]:
    """Prompts of one token go on counting from it."""
    scripts = {(i,): range(i + 1, 5) for i in range(5)}
    return scripted(LLAMA, WORDS, scripts, **limits)


def run(llm: LLM, body: Callable[[AsyncEngine], Coroutine[Any, Any, None]], **options: int) -> None:
    async def main() -> None:
        async with AsyncEngine(llm.engine, **options) as engine:
            await body(engine)
            assert engine.num_under_way == 0
            assert llm.engine._cache.num_slots == 0

    asyncio.run(asyncio.wait_for(main(), 60))


async def collect(generation: Generation) -> list[Chunk]:
    async with generation:
        return [chunk async for chunk in generation.chunks()]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_chunks_are_the_completion_in_pieces() -> None:
    llm = LLM(build_model(LLAMA, key=RngKey(3)), ByteTokenizer())
    rules = [SamplingParams(max_tokens=9 + i, temperature=i % 2, seed=i) for i in range(8)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(8)]
    expected = llm.generate(prompts, rules)

    async def body(engine: AsyncEngine) -> None:
        groups = [
            [llm.request(p, rule, follow=True) for p, rule in zip(prompts, rules, strict=True)][a:b]
            for a, b in ((0, 1), (1, 3), (3, 8))
        ]
        streams = (collect(engine.submit(group, stream=True)) for group in groups)
        for group, chunks in zip(groups, await asyncio.gather(*streams), strict=True):
            for index, one in enumerate(group):
                mine = [chunk for chunk in chunks if chunk.index == index]
                done = next(d for d in expected if d.token_ids == tuple(one.tokens))
                assert "".join(chunk.text for chunk in mine) == done.text
                assert [i for c in mine for i in c.tokens] == list(range(len(done.token_ids)))
                assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
                assert mine[-1].finish_reason == done.finish_reason
                assert all(chunk.text for chunk in mine[:-1])

    run(llm, body)


def test_whoever_does_not_stream_gets_one_chunk_each() -> None:
    llm, _ = counting()

    async def body(engine: AsyncEngine) -> None:
        chunks = await collect(engine.submit([request(llm, 0), request(llm, 2, tokens=1)]))
        assert [(c.index, c.text) for c in chunks] == [(1, "three "), (0, "one two three four ")]
        assert [list(c.tokens) for c in chunks] == [[0], [0, 1, 2, 3]]
        generation = engine.submit([request(llm, 0), request(llm, 1)])
        async with generation:
            await generation.finish()
            assert [r.finish_reason for r in generation.requests] == ["length", "length"]
        nothing = await collect(engine.submit([request(llm, 0, tokens=0)]))
        assert [(c.text, list(c.tokens), c.finish_reason) for c in nothing] == [("", [], "length")]
        silent = Request(prompt=(0,), params=SamplingParams(max_tokens=2))
        chunks = await collect(engine.submit([silent], stream=True))
        assert [list(c.tokens) for c in chunks] == [[0], [1]]

    run(llm, body)


def test_requests_join_between_steps_and_text_comes_as_it_is_made() -> None:
    llm, runner = counting()
    runner.turns = threading.Semaphore(2)

    async def body(engine: AsyncEngine) -> None:
        async with engine.submit([request(llm, 0, stop=("four",))], stream=True) as first:
            chunks = first.chunks()
            assert (await anext(chunks)).text == "one "
            assert (await anext(chunks)).text == "two "
            await until(lambda: len(llm.engine._sequences) == 1)
            async with engine.submit([request(llm, 1, tokens=2)], stream=True) as second:
                assert runner.turns is not None
                runner.turns.release(9)
                last = [chunk async for chunk in chunks]
                assert [(c.text, c.finish_reason) for c in last] == [("three ", None), ("", "stop")]
                # The stop string's token belongs to no text, and is told at the end.
                assert [list(c.tokens) for c in last] == [[2], [3]]
                texts = [chunk.text async for chunk in second.chunks()]
                assert texts == ["two ", "three "]
        assert runner.passes < 4 + 2  # one of them at least was for both

    run(llm, body)


def test_a_step_that_fails_fails_those_in_it_and_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm, runner = counting(max_sequences=2)
    runner.turns = threading.Semaphore(0)
    runner.error = RuntimeError("no memory\nleft")

    async def body(engine: AsyncEngine) -> None:
        two = engine.submit([request(llm, 0), request(llm, 1)])
        waiting = engine.submit([request(llm, 2, tokens=1)])
        tasks = [asyncio.create_task(collect(g)) for g in (two, waiting)]
        assert runner.turns is not None
        runner.turns.release(9)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], GenerationError)
        assert str(results[0]) == "RuntimeError: no memory left"
        assert isinstance(results[1], list)
        assert results[1][0].text == "three "
        after = await collect(engine.submit([request(llm, 3, tokens=1)]))
        assert after[0].text == "four "

    run(llm, body)
    assert "no memory" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_stops_the_work_and_frees_the_cache(stream: bool) -> None:
    llm, runner = counting(max_sequences=1)
    runner.turns = threading.Semaphore(0)

    async def body(engine: AsyncEngine) -> None:
        assert runner.turns is not None
        running, waiting = request(llm, 0, tokens=2000), request(llm, 1, tokens=2000)
        async with engine.submit([running], stream=stream), engine.submit([waiting]):
            runner.turns.release(3)
            await until(lambda: len(running.tokens) == 3)
            assert llm.engine._cache.num_slots > 1999
        runner.turns.release(100)
        await until(lambda: engine.num_under_way == 0)
        assert llm.engine._cache.num_slots == 0
        passes = runner.passes
        assert passes <= 4  # the one that was under way meanwhile
        await asyncio.sleep(0.05)
        assert runner.passes == len(running.tokens) == passes
        assert waiting.tokens == []
        assert (running.finish_reason, waiting.finish_reason) == (None, None)
        chunks = await collect(engine.submit([request(llm, 0)]))
        assert chunks[0].finish_reason == "length"

    run(llm, body)


def test_too_many_are_refused_all_or_none() -> None:
    llm, runner = counting(max_sequences=2)
    runner.turns = threading.Semaphore(0)

    async def body(engine: AsyncEngine) -> None:
        first = engine.submit([request(llm, 0), request(llm, 0)])
        message = "2 more requests do not fit: 2 of at most 3 are under way; try again later"
        with pytest.raises(QueueFullError, match=f"^{message}$"):
            engine.submit([request(llm, 0), request(llm, 0)])
        second = engine.submit([request(llm, 0)])
        with pytest.raises(QueueFullError, match=r"^1 more requests do not fit: 3 of at most 3"):
            engine.submit([request(llm, 0)])
        assert runner.turns is not None
        runner.turns.release(99)
        await asyncio.gather(collect(first), collect(second))
        await collect(engine.submit([request(llm, 0)]))

    run(llm, body, max_waiting=1)
    with pytest.raises(ValueError, match=r"^max_waiting=-1 must be at least 0$"):
        AsyncEngine(llm.engine, max_waiting=-1)


def test_requests_that_cannot_run_are_refused_at_once() -> None:
    llm, _ = counting()

    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(ValueError, match=re.escape("prompt 2 of 2: the prompt is empty")):
            engine.submit([request(llm, 0), request(llm)])

    run(llm, body)


def test_draining_takes_nothing_more_and_waits_for_the_rest() -> None:
    llm, runner = counting()
    runner.turns = threading.Semaphore(0)

    async def body(engine: AsyncEngine) -> None:
        last = asyncio.create_task(collect(engine.submit([request(llm, 0)])))
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
        with pytest.raises(DrainingError, match="takes no more requests"):
            engine.submit([request(llm, 0)])
        assert not draining.done()
        assert runner.turns is not None
        runner.turns.release(9)
        await draining
        assert (await last)[0].finish_reason == "length"
        await engine.drain()  # at once

    run(llm, body)


def test_closing_fails_what_is_under_way() -> None:
    llm, runner = counting(max_sequences=1)
    runner.turns = threading.Semaphore(0)

    async def body(engine: AsyncEngine) -> None:
        tasks = [
            asyncio.create_task(collect(engine.submit([request(llm, 0)], stream=stream)))
            for stream in (True, False)
        ]
        await until(lambda: llm.engine._sequences)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.01)
        assert runner.turns is not None
        runner.turns.release()
        await closing
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineClosedError)
        with pytest.raises(DrainingError):
            engine.submit([request(llm, 0)])

    run(llm, body)


def test_an_engine_with_nothing_to_do_does_nothing() -> None:
    llm, runner = counting()

    async def body(engine: AsyncEngine) -> None:
        await collect(engine.submit([request(llm, 0)]))
        used = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - used < 0.1
        assert runner.passes == 4

    run(llm, body)
