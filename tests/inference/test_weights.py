"""Weights handed from a model in training to a living engine, between any two layouts."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_data import ByteTokenizer
from mcore_inference import LLM, Request, SamplingParams, WeightLink, model_tensors
from mcore_models import GlobalCounts, ModelConfig, TokenBatch, build_model
from mcore_parallel import (
    SGD,
    GradientBuckets,
    Group,
    LayoutTensor,
    ParallelConfig,
    ParallelMesh,
    RngKey,
    ShardedOptimizer,
)
from mcore_parallel.layout import gather_all
from mcore_parallel.testing import RankPool

sys.path.append(str(Path(__file__).parent))
from small_models import GPT2, LLAMA

Weights = dict[str, Tensor]
TIED = replace(GPT2, tied_embeddings=True)
UNTIED = replace(LLAMA, tied_embeddings=False)


def whole(tensors: dict[str, LayoutTensor], group: Group) -> Weights:
    """Global tensors by name, on the first rank of the group."""
    return gather_all(tensors, group)


def hand_over(
    config: ModelConfig,
    trainer: str,
    engine: str,
    engine_ranks: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
) -> list[Weights]:
    """What this rank's engine holds after a first and a second update (first rank of its tp)."""
    mesh = ParallelMesh.create(ParallelConfig.parse(trainer), device=device)
    assert mesh is not None
    trained = build_model(config, mesh, key=RngKey(3))
    place = ParallelMesh.create(ParallelConfig.parse(engine), ranks=engine_ranks, device=device)
    llm = None
    if place is not None:
        llm = LLM(build_model(config, place, dtype=dtype, key=None), ByteTokenizer())
    link = WeightLink(model_tensors(trained), llm.model if llm else None, mesh.world)
    seen: list[Weights] = []
    for version in (1, 2):
        if llm is None:
            link()
        else:
            assert place is not None
            storage = [p.data_ptr() for p in llm.model.parameters()]
            assert llm.update_weights(link) == version
            assert [p.data_ptr() for p in llm.model.parameters()] == storage
            seen.append(whole(model_tensors(llm.model), place.replica))
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1.5)
    return [weights for weights in seen if weights]


def expected(config: ModelConfig, dtype: torch.dtype) -> list[Weights]:
    """The same from one process that has all of it."""
    alone = whole(model_tensors(build_model(config, key=RngKey(3))), Group.single())
    scaled = {name: value * 1.5 for name, value in alone.items()}
    return [{name: x.to(dtype) for name, x in weights.items()} for weights in (alone, scaled)]


def assert_equal(found: list[Weights], right: list[Weights]) -> None:
    for ours, theirs in zip(found, right, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name].cpu().equal(value), name


@pytest.mark.parametrize("config", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("trainer", "engine", "engine_ranks", "size"),
    [
        ("tp=2", "dp=2", (0, 1), 2),
        ("tp=2", "tp=1", (0,), 2),
        ("tp=2,sp", "tp=1", (1,), 2),
        ("pp=2", "dp=2", (0, 1), 2),
        ("pp=2", "tp=2", (0, 1), 2),
        ("dp=2", "tp=2", (0, 1), 2),
        ("tp=2,pp=2", "tp=2,dp=2", (0, 1, 2, 3), 4),
    ],
)
def test_the_engine_holds_bitwise_what_was_trained(
    ranks: RankPool,
    config: ModelConfig,
    dtype: torch.dtype,
    trainer: str,
    engine: str,
    engine_ranks: tuple[int, ...],
    size: int,
) -> None:
    seen = ranks.run(hand_over, size, config, trainer, engine, engine_ranks, dtype)
    engines = [found for found in seen if found]
    tp = ParallelConfig.parse(engine).tp
    assert len(engines) == len(engine_ranks) // tp
    for found in engines:
        assert_equal(found, expected(config, dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_gpus(ranks: RankPool) -> None:
    size = min(2, torch.cuda.device_count())
    arguments = (TIED, f"tp={size}", f"dp={size}", tuple(range(size)), torch.bfloat16, "cuda")
    for found in ranks.run(hand_over, size, *arguments, device="cuda"):
        assert_equal(found, expected(TIED, torch.bfloat16))


def masters_over_two_ranks(dtype: torch.dtype) -> tuple[Weights, Weights, Weights]:
    """The fp32 masters of a bf16 model, its parameters, and an engine that took the masters."""
    mesh = ParallelMesh.create(ParallelConfig(dp=2))
    assert mesh is not None
    trained = build_model(TIED, mesh, dtype=torch.bfloat16, key=RngKey(3))
    buckets = GradientBuckets(dict(trained.named_parameters()), trained.specs(), mesh)
    optimizer = ShardedOptimizer(buckets, SGD())
    tokens = torch.arange(12).view(2, 6)
    batch = TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1))
    buckets.zero()
    trained.loss(batch, counts=GlobalCounts(tokens=24)).backward()
    buckets.finish()
    optimizer.step(0.3)
    masters = {
        key: LayoutTensor(x.tensor, x.layout.renamed(lambda name: name.removeprefix("model/")))
        for key, x in optimizer.state_tensors().items()
        if key.startswith("model/")
    }
    engine = build_model(TIED, dtype=dtype, key=None)
    WeightLink(masters, engine, mesh.world)()
    parameters = whole(model_tensors(trained), mesh.replica)
    held = whole(model_tensors(engine), Group.single(mesh.rank))
    return whole(masters, mesh.world), parameters, held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_masters_that_are_cut_over_the_replicas(ranks: RankPool, dtype: torch.dtype) -> None:
    """fp32 masters arrive as they are, or rounded once: as the trainer's own bf16 parameters."""
    seen = ranks.run(masters_over_two_ranks, 2, dtype)
    masters, parameters, _ = seen[0]
    assert any(not x.equal(x.bfloat16().float()) for x in masters.values()), "nothing to round"
    for _, _, held in seen:
        for name, value in held.items():
            assert value.dtype == dtype
            assert value.equal(masters[name].to(dtype)), name
            if dtype == torch.bfloat16:
                assert value.equal(parameters[name]), name


def test_completions_carry_the_version_of_their_weights() -> None:
    first, second = (build_model(LLAMA, key=RngKey(seed)) for seed in (1, 2))
    llm = LLM(build_model(LLAMA, key=None), ByteTokenizer())
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    answers = []
    for trained, version in ((first, None), (second, 7), (first, None)):
        llm.update_weights(
            WeightLink(model_tensors(trained), llm.model, Group.single()), version=version
        )
        answers.append(llm.generate("hello", params)[0])
    assert [answer.weights_version for answer in answers] == [1, 7, 8]
    assert answers[0].token_ids == answers[2].token_ids != answers[1].token_ids
    alone = LLM(build_model(LLAMA, key=RngKey(2)), ByteTokenizer()).generate("hello", params)[0]
    assert alone.token_ids == answers[1].token_ids
    assert alone.weights_version == 0


def refused_on_rank_1() -> tuple[str, bool, int]:
    """The message, whether the weights stayed, and the version after the request was dropped."""
    world = Group.world()
    trained = build_model(LLAMA, key=RngKey(1))
    llm = LLM(build_model(LLAMA, key=RngKey(2)), ByteTokenizer())
    before = [p.clone() for p in llm.model.parameters()]
    link = WeightLink(model_tensors(trained), llm.model, world)
    request = Request(prompt=(1, 2), params=SamplingParams(max_tokens=5, ignore_eos=True))
    if world.rank == 1:
        llm.engine.add(request)
        llm.engine.step()
    with pytest.raises(RuntimeError) as caught:
        llm.update_weights(link)
    stayed = all(map(torch.equal, before, llm.model.parameters()))
    llm.engine.abort([request])
    return str(caught.value), stayed, llm.update_weights(link)


def test_a_busy_engine_refuses_on_every_rank(ranks: RankPool) -> None:
    """The other ranks hear of it instead of waiting for copies that never come."""
    message = "weights cannot be updated now: 1 requests are under way: finish or abort them"
    assert ranks.run(refused_on_rank_1, 2) == [(message, True, 1)] * 2


def test_another_architecture_is_refused_by_name() -> None:
    trained, engine = build_model(LLAMA), build_model(replace(LLAMA, num_layers=3), key=None)
    with pytest.raises(ValueError, match=r"layers\.2\.\S+: no source holds this tensor"):
        WeightLink(model_tensors(trained), engine, Group.single())
    engine = build_model(replace(LLAMA, ffn_size=64), key=None)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.\S+: global shapes .* differ"):
        WeightLink(model_tensors(trained), engine, Group.single())
