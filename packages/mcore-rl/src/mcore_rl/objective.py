"""What the last pipeline stage computes: from a micro-batch to its share of a policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_models import GPT, AuxiliaryLosses, GlobalCounts
from mcore_parallel import ParallelMesh, RngKey, VocabParallelHead, all_reduce
from mcore_rl.batch import PolicyBatch
from mcore_rl.log_probs import LogProbs
from mcore_rl.losses import PolicyCounts, PolicyLoss, PolicyLossInput

ENTROPY = "entropy"
GAP_MEAN = "log_prob_difference_mean"
GAP_MAX = "log_prob_difference_max"


class PolicyObjective:
    """A policy loss as `mcore_train.Step` takes it, and the numbers of a pass beside it.

    Besides the loss's own metrics, over the policy's tokens of the global batch:
    `entropy`, the mean of −ln π, which is an estimate of the entropy of what was drawn from;
    `log_prob_difference_mean` and `…_max`, of |ln π − what the engine said|: before the first
    update of a step it is how far trainer and engine disagree about the same weights.

    Args:
        loss: the loss.
        rule: how log-probabilities are taken.
        sequences: rollouts of the global batch.
        max_tokens: the most tokens that the policy may write in one.
    """

    def __init__(
        self, loss: PolicyLoss, rule: LogProbs, *, sequences: int, max_tokens: int
    ) -> None:
        self.loss = loss
        self.rule = rule
        self.sequences = sequences
        self.max_tokens = max_tokens
        self.names = (*loss.metrics, ENTROPY, GAP_MEAN)
        self._sums: dict[str, Tensor] = {}
        self._max: Tensor | None = None

    def __call__(
        self,
        model: GPT,
        batch: PolicyBatch,
        hidden: Tensor | None = None,
        /,
        *,
        counts: GlobalCounts,
        rng: RngKey | None = None,
        auxiliary: AuxiliaryLosses | None = None,
    ) -> Tensor:
        """See `mcore_train.StageLoss`."""
        log_probs = token_log_probs(
            model, batch, hidden, rule=self.rule, rng=rng, auxiliary=auxiliary
        )
        assert batch.loss_mask is not None
        output = self.loss(
            PolicyLossInput(
                log_probs=log_probs,
                behaviour=batch.behaviour,
                advantages=batch.advantages,
                mask=batch.loss_mask,
                lengths=batch.own_lengths,
                reference=batch.reference,
            )
        )
        foreign = batch.loss_mask == 0
        known = log_probs.detach().masked_fill(foreign, 0.0)
        gap = (known - batch.behaviour.masked_fill(foreign, 0.0)).abs()
        self._add({**output.sums, ENTROPY: -known.sum(), GAP_MEAN: gap.sum()}, gap.max())
        totals = PolicyCounts(
            tokens=counts.tokens, sequences=self.sequences, max_tokens=self.max_tokens
        )
        return output.total / self.loss.denominator(totals)

    def take(self, mesh: ParallelMesh, tokens: int) -> dict[str, float]:
        """Return the numbers of the pass that has ended, the same on every rank, and forget them.

        `tokens`: the policy's own tokens of the global batch. Reduces over `mesh.world`.
        """
        zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
        here = mesh.is_last_stage and mesh.tp.rank == 0
        sums = [self._sums.get(name, zero) if here else zero for name in self.names]
        totals = all_reduce(torch.stack(sums), mesh.world).tolist()
        largest = all_reduce(zero if self._max is None else self._max, mesh.world, op="max")
        self._sums, self._max = {}, None
        numbers = {name: total / tokens for name, total in zip(self.names, totals, strict=True)}
        return {**numbers, GAP_MAX: float(largest)}

    def _add(self, sums: dict[str, Tensor], largest: Tensor) -> None:
        for name, value in sums.items():
            wide = value.double()
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide
        wide = largest.double()
        self._max = wide if self._max is None else torch.maximum(self._max, wide)


def token_log_probs(
    model: GPT,
    batch: PolicyBatch,
    hidden: Tensor | None,
    *,
    rule: LogProbs,
    rng: RngKey | None = None,
    auxiliary: AuxiliaryLosses | None = None,
) -> Tensor:
    """Return ln π [T] of the labels in the batch's loss mask, 0 of others; at least float32.

    For the last pipeline stage. Logits are never whole (`GPT.log_probs`).
    """
    assert isinstance(model.lm_head, VocabParallelHead)
    return model.log_probs(
        batch, hidden, rng=rng, auxiliary=auxiliary, changes=rule.changes(model.lm_head)
    )
