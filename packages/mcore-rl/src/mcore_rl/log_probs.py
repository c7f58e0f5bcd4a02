"""Log-probabilities of sampled tokens, by one rule on both sides: engine and trainer.

Importance ratios compare what the trainer says of a token with what the engine said when it drew
it. They are 1 before the first update only if both speak of the same distribution.

T tokens, V vocabulary, v this rank's (padded) share of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mcore_inference import Completion, SamplingParams, allowed_probabilities
from mcore_parallel import Group, VocabLossOp, gather_logits
from mcore_parallel.tensor import vocab_parallel_log_prob

LogProbKind = Literal["processed", "raw"]


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """The rule by which log-probabilities are taken.

    Attributes:
        kind: `processed` is the distribution that tokens were drawn from: after the temperature,
            after top-k and top-p, among the tokenizer's ids; the policy gradient of what was
            sampled. `raw` is the model's own softmax over all of its rows: what is then trained is
            not quite what acted, unless temperature is 1 and nothing is cut.
        sampling: how tokens are drawn.
        num_ids: how many ids the tokenizer has; only these are drawn.

    The trainer finds the tokens that top-k and top-p keep from its own logits, and counts the token
    that was drawn among them: where two logits at the edge differ by less than the two sides'
    rounding, the ratio moves by what the one token at the edge weighs.
    """

    kind: LogProbKind
    sampling: SamplingParams
    num_ids: int

    def behaviour(self, completion: Completion) -> tuple[float, ...]:
        """Return what the engine said of each token that it drew."""
        return completion.logprobs if self.kind == "raw" else completion.sampling_logprobs

    def of_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor,
        group: Group,
        *,
        vocab_size: int,
        op: VocabLossOp | None = None,
    ) -> Tensor:
        """Return the log-probability of each label [T] float32, with gradient, on every rank.

        Communicates over `group`: per-token numbers and, where top-k or top-p cut, the logits.

        Args:
            logits: [T, v], this rank's columns.
            labels: [T] int64.
            mask: [T], 0 where the result does not matter and nothing is cut.
            group: the ranks that share the vocabulary.
            vocab_size: V, the model's rows.
            op: the vocabulary loss to use.
        """
        if self.kind == "processed":
            logits = self._processed(logits, labels, mask, group, vocab_size)
        return vocab_parallel_log_prob(logits, labels, group, vocab_size=vocab_size, op=op)

    def _processed(
        self, logits: Tensor, labels: Tensor, mask: Tensor, group: Group, vocab_size: int
    ) -> Tensor:
        """Return logits [T, v] whose softmax is the distribution that was drawn from."""
        sampling, columns = self.sampling, logits.shape[-1]
        hidden: Tensor | None = None
        if self.num_ids < vocab_size:
            ids = torch.arange(columns, device=logits.device) + group.rank * columns
            hidden = (ids >= self.num_ids).expand_as(logits)
        if sampling.top_k or sampling.top_p < 1:
            cut = self._cut(logits.detach(), labels, mask, group, vocab_size)
            hidden = cut if hidden is None else hidden | cut
        if sampling.temperature != 1:
            logits = logits.float() / sampling.temperature
        return logits if hidden is None else logits.masked_fill(hidden, -torch.inf)

    def _cut(
        self, logits: Tensor, labels: Tensor, mask: Tensor, group: Group, vocab_size: int
    ) -> Tensor:
        """Return which of my columns [T, v] top-k and top-p cut off; none where the mask is 0."""
        columns = logits.shape[-1]
        rows = mask.nonzero()[:, 0]
        whole = gather_logits(logits[rows], group, vocab_size=vocab_size)[:, : self.num_ids]
        kept = allowed_probabilities(whole, [self.sampling] * len(rows)) > 0
        kept.scatter_(1, labels[rows, None], True)
        padded = kept.new_zeros(len(rows), columns * group.size)
        padded[:, : self.num_ids] = kept
        cut = torch.zeros_like(logits, dtype=torch.bool)
        cut[rows] = ~padded[:, group.rank * columns :][:, :columns]
        return cut
