"""Trainer and engine say the same of every token, by whichever rule."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_data import ByteTokenizer
from mcore_inference import LLM, SamplingParams, WeightLink, model_tensors
from mcore_models import build_model
from mcore_parallel import Group, ParallelConfig, ParallelMesh, RngKey
from mcore_parallel.testing import RankPool
from mcore_rl import (
    LogProbKind,
    LogProbs,
    Rollout,
    make_environment,
    play_together,
    policy_batch,
    token_log_probs,
)

sys.path.append(str(Path(__file__).parent))
from small_runs import VOCABULARY, model_config

SAMPLINGS = {
    "plain": SamplingParams(max_tokens=6, temperature=1.0),
    "warm": SamplingParams(max_tokens=6, temperature=0.6),
    "top-p": SamplingParams(max_tokens=6, temperature=1.3, top_p=0.8),
    "top-k": SamplingParams(max_tokens=6, temperature=1.0, top_k=5),
    "both": SamplingParams(max_tokens=6, temperature=0.9, top_k=40, top_p=0.9),
}
PROBS = [0.5, 0.3, 0.15, 0.05]


def rule(kind: LogProbKind, sampling: SamplingParams, num_ids: int = VOCABULARY) -> LogProbs:
    return LogProbs(kind=kind, sampling=sampling, num_ids=num_ids)


def test_known_values() -> None:
    """U55: probabilities .5 .3 .15 .05, top_p .8, token 0: raw and processed, both selectable."""
    logits = torch.tensor([PROBS]).log().requires_grad_()
    sampling = SamplingParams(temperature=1.0, top_p=0.8)
    found = {}
    for kind in ("raw", "processed"):
        value = rule(kind, sampling, 4).of_logits(
            logits, torch.tensor([0]), torch.ones(1), Group.single(), vocab_size=4
        )
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        found[kind] = value.item(), gradient[0]
    assert found["raw"][0] == pytest.approx(-0.693147, abs=1e-6)
    assert found["processed"][0] == pytest.approx(-0.470004, abs=1e-6)
    # What was cut off cannot be drawn, so nothing is to be learned about it.
    expected = torch.tensor([1 - 0.5 / 0.8, -0.3 / 0.8, 0.0, 0.0])
    torch.testing.assert_close(found["processed"][1], expected)
    torch.testing.assert_close(found["raw"][1], torch.tensor([0.5, -0.3, -0.15, -0.05]))


def test_temperature_ids_and_places_that_do_not_count() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]] * 2)
    warm = SamplingParams(temperature=2.0, top_k=1)
    labels, mask = torch.tensor([2, 0]), torch.tensor([1.0, 0.0])
    value = rule("processed", warm, 3).of_logits(logits, labels, mask, Group.single(), vocab_size=4)
    # Token 3 is no id of the tokenizer; where the mask is 0 nothing is cut but that.
    free = (logits[1, :3] / 2).log_softmax(-1)[0]
    torch.testing.assert_close(value, torch.stack([torch.zeros(()), free]))


def test_a_drawn_token_counts_as_kept() -> None:
    """At the edge of a cut two sides may differ by a rounding: then the ratio is finite."""
    logits = torch.tensor([[1.0, 1.0 - 1e-7, 0.0]])
    value = rule("processed", SamplingParams(temperature=1.0, top_k=1), 3).of_logits(
        logits, torch.tensor([1]), torch.ones(1), Group.single(), vocab_size=3
    )
    assert value.item() == pytest.approx(math.log(0.5), abs=1e-5)


def score(
    kind: LogProbKind, sampling: SamplingParams, layout: str, engine: str, rows: int
) -> tuple[list[Rollout], Tensor, Tensor]:
    """Rollouts of an engine, and both sides' log-probabilities of its tokens, side by side."""
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    place = ParallelMesh.create(ParallelConfig.parse(engine))
    assert mesh is not None
    assert place is not None
    architecture = model_config(vocab_size=rows)
    trained = build_model(architecture, mesh, key=RngKey(1))
    llm = LLM(build_model(architecture, place, key=None), ByteTokenizer())
    llm.update_weights(WeightLink(model_tensors(trained), llm.model, mesh.world))
    by = rule(kind, sampling)
    rollouts = play_together(
        llm,
        lambda: make_environment("guess_number"),
        range(6),
        samples=2,
        rule=by,
        sampling=sampling,
        key=RngKey(2),
        max_turns=2,
    )
    batch = policy_batch(rollouts, [0.0] * len(rollouts))
    with torch.no_grad():
        found = token_log_probs(trained, batch, None, rule=by)
    assert batch.loss_mask is not None
    own = batch.loss_mask == 1
    return rollouts, found[own], batch.behaviour[own]


@pytest.mark.parametrize("kind", ["processed", "raw"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_ratio_is_one_before_the_first_update(kind: LogProbKind, sampling: SamplingParams) -> None:
    """U55: |Δ ln p| ≤ 1e-5 on every token drawn, over two turns with text between them."""
    rollouts, trainer, engine = score(kind, sampling, "tp=1", "tp=1", VOCABULARY)
    assert len(trainer) == sum(rollout.response_length for rollout in rollouts) > 100
    assert (trainer - engine).abs().max() <= 1e-5
    assert engine.std() > 0.1
    # One place off, and nothing fits.
    assert (trainer[1:] - engine[:-1]).abs().mean() > 0.1


def test_the_two_rules_differ_by_what_was_cut() -> None:
    """U55: with top_p below 1 raw and processed are apart by up to −ln(top_p) and more."""
    sampling = SAMPLINGS["top-p"]
    _, processed, _ = score("processed", sampling, "tp=1", "tp=1", VOCABULARY)
    _, raw, _ = score("raw", sampling, "tp=1", "tp=1", VOCABULARY)
    assert (processed - raw).abs().max() > -math.log(0.8)


def test_rows_beyond_the_tokenizer_are_left_out_on_both_sides() -> None:
    for kind in ("processed", "raw"):
        _, trainer, engine = score(kind, SAMPLINGS["both"], "tp=1", "tp=1", 300)
        assert (trainer - engine).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("layout", "engine"), [("tp=2", "dp=2"), ("tp=2", "tp=2"), ("dp=2", "tp=2")]
)
@pytest.mark.parametrize("rows", [VOCABULARY, 300])
def test_ratio_is_one_over_two_ranks(ranks: RankPool, layout: str, engine: str, rows: int) -> None:
    """U55 with a vocabulary that is cut over the trainer, the engine, or both."""
    expected = score("processed", SAMPLINGS["both"], "tp=1", "tp=1", rows)
    for rollouts, found, said in ranks.run(
        score, 2, "processed", SAMPLINGS["both"], layout, engine, rows
    ):
        assert (found - said).abs().max() <= 1e-5
        assert [r.tokens for r in rollouts] == [r.tokens for r in expected[0]]
        torch.testing.assert_close(found, expected[1], rtol=0, atol=1e-5)
