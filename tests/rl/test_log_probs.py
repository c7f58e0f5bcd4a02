"""Trainer and engine say the same of every token, by whichever rule."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_data import ByteTokenizer
from mcore_inference import (
    LLM,
    SamplingParams,
    WeightLink,
    allowed_probabilities,
    model_tensors,
)
from mcore_kernels import Kernels, VocabShard, fused_head_log_probs
from mcore_models import GPT, TokenBatch, build_model
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey, VocabParallelHead, gather_logits
from mcore_parallel.testing import RankPool
from mcore_rl import (
    GRPOLoss,
    LogProbKind,
    LogProbs,
    PolicyBatch,
    PolicyLossInput,
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


def of_logits(by: LogProbs, logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of a model with these logits: its head multiplies by the identity."""
    kernels, size = Kernels(), logits.shape[1]
    return fused_head_log_probs(
        logits,
        torch.eye(size),
        labels,
        linear=kernels.linear,
        op=kernels.cross_entropy,
        shard=VocabShard(vocab_size=size),
        changes=by.changes(VocabParallelHead(size, size)),
    ).log_prob


def test_known_values() -> None:
    """U55: probabilities .5 .3 .15 .05, top_p .8, token 0: raw and processed, both selectable."""
    logits = torch.tensor([PROBS]).log().requires_grad_()
    sampling = SamplingParams(temperature=1.0, top_p=0.8)
    found = {}
    for kind in ("raw", "processed"):
        value = of_logits(rule(kind, sampling, 4), logits, torch.tensor([0]))
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        found[kind] = value.item(), gradient[0]
    assert found["raw"][0] == pytest.approx(-0.693147, abs=1e-6)
    assert found["processed"][0] == pytest.approx(-0.470004, abs=1e-6)
    # What was cut off cannot be drawn, so nothing is to be learned about it.
    expected = torch.tensor([1 - 0.5 / 0.8, -0.3 / 0.8, 0.0, 0.0])
    torch.testing.assert_close(found["processed"][1], expected)
    torch.testing.assert_close(found["raw"][1], torch.tensor([0.5, -0.3, -0.15, -0.05]))


def test_temperature_and_ids() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]] * 2).requires_grad_()
    value = of_logits(
        rule("processed", SamplingParams(temperature=2.0), 3), logits, torch.tensor([2, 0])
    )
    # Token 3 is no id of the tokenizer.
    free = (logits[:, :3] / 2).log_softmax(-1)[[0, 1], [2, 0]]
    torch.testing.assert_close(value, free)
    found, expected = (torch.autograd.grad(one.exp().sum(), logits) for one in (value, free))
    torch.testing.assert_close(found, expected)


def test_a_drawn_token_counts_as_kept() -> None:
    """At the edge of a cut two sides may differ by a rounding: then the ratio is finite."""
    logits = torch.tensor([[1.0, 1.0 - 1e-7, 0.0]])
    by = rule("processed", SamplingParams(temperature=1.0, top_k=1), 3)
    value = of_logits(by, logits, torch.tensor([1]))
    assert value.item() == pytest.approx(math.log(0.5), abs=1e-5)


def test_a_cut_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    by = rule("processed", SAMPLINGS["both"], 9)
    whole = of_logits(by, logits, torch.arange(7))
    monkeypatch.setattr("mcore_rl.log_probs._CUT_AT_A_TIME", 22)
    assert torch.equal(of_logits(by, logits, torch.arange(7)), whole)


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


def plain(model: GPT, batch: PolicyBatch, sampling: SamplingParams, num_ids: int) -> Tensor:
    """The same from whole logits, by torch's own functions."""
    logits = gather_logits(
        model.stage_forward(batch), model.mesh.tp, vocab_size=model.config.vocab_size
    )[:, :num_ids]
    allowed = allowed_probabilities(logits, [sampling] * len(logits)) > 0
    allowed.scatter_(1, batch.labels[:, None], True)  # type: ignore[index]
    warm = (logits / sampling.temperature).masked_fill(~allowed, -torch.inf)
    return warm.log_softmax(-1).gather(1, batch.labels[:, None])[:, 0]  # type: ignore[index]


def loss_gradients(layout: str, rows: int, cap: float | None) -> dict[str, list[Tensor]]:
    """Gradients of GRPO's loss, from chunks of three tokens and from whole logits."""
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    config = replace(model_config(vocab_size=rows), logit_softcap=cap)
    model = build_model(config, mesh, key=RngKey(1))
    assert isinstance(model.lm_head, VocabParallelHead)
    by, generator = rule("processed", SAMPLINGS["both"]), torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (2, 14), generator=generator)
    mask = (torch.arange(14) >= torch.tensor([[5], [8]])).float().flatten()
    columns = torch.randn(2, 28, generator=generator)
    base = TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1), loss_mask=mask)
    batch = PolicyBatch(
        **vars(base),
        behaviour=columns[0] - 3,
        advantages=columns[1],
        own_lengths=torch.full((28,), 9.0),
    )
    found: dict[str, list[Tensor]] = {}
    for chunks in (True, False):
        if chunks:
            value = model.log_probs(batch, changes=by.changes(model.lm_head), chunk_tokens=3)
        else:
            value = plain(model, batch, by.sampling, VOCABULARY)
        inputs = PolicyLossInput(
            log_probs=value,
            behaviour=batch.behaviour,
            advantages=batch.advantages,
            mask=mask,
            lengths=batch.own_lengths,
        )
        total = GRPOLoss(clip_high=5.0)(inputs).total
        parameters = dict(model.named_parameters())
        grads = torch.autograd.grad(total, list(parameters.values()))
        for name, one in zip(("loss", *parameters), (total.detach(), *grads), strict=True):
            found.setdefault(name, []).append(one)
    mesh.close()
    return found


@pytest.mark.parametrize(("rows", "cap"), [(VOCABULARY, 2.0), (300, None)])
def test_loss_and_gradient_are_those_of_whole_logits(
    ranks: RankPool, rows: int, cap: float | None
) -> None:
    """Vocabulary whole and over two ranks, of which the second has few ids or padding."""
    for found in (
        loss_gradients("tp=1", rows, cap),
        *ranks.run(loss_gradients, 2, "tp=2", rows, cap),
    ):
        for name, (chunks, whole) in found.items():
            assert whole.any(), name
            torch.testing.assert_close(chunks, whole, rtol=1e-4, atol=1e-5, msg=name)
