"""Log-probabilities of sampled tokens, by one rule on both sides: engine and trainer.

Importance ratios compare what the trainer says of a token with what the engine said when it drew
it. They are 1 before the first update only if both speak of the same distribution.

V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_inference import Completion, SamplingParams, allowed_probabilities
from mcore_kernels import LogitsChange
from mcore_parallel import VocabParallelHead, gather_logits

_CUT_AT_A_TIME = 2**25  # logits, of which a cut makes several copies in float64

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

    def changes(self, head: VocabParallelHead) -> tuple[LogitsChange, ...]:
        """Return what makes of the model's logits those of the distribution, under this rule.

        For `GPT.log_probs`. Where top-k or top-p cut, it gathers logits over the group of `head`,
        a bounded number at a time.
        """
        if self.kind == "raw" or not self._does_something(head):
            return ()
        return (_Processed(self.sampling, self.num_ids, head),)

    def _does_something(self, head: VocabParallelHead) -> bool:
        sampling = self.sampling
        cuts = bool(sampling.top_k) or sampling.top_p < 1
        return cuts or sampling.temperature != 1 or self.num_ids < head.vocab_size


class _Processed:
    """`LogitsChange` to logits whose softmax is the distribution that was drawn from.

    t tokens, each of which was drawn: its label counts among what is kept.
    """

    def __init__(self, sampling: SamplingParams, num_ids: int, head: VocabParallelHead) -> None:
        self.sampling = sampling
        self.num_ids = num_ids
        self.group = head.group
        self.vocab_size = head.vocab_size
        self.first, self.rows = head.shard.start, head.shard.rows

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `LogitsChange`; logits [t, V of this shard, without padding]."""
        columns, hidden = logits.shape[1], None
        if self.num_ids < self.vocab_size:
            ids = self.first + torch.arange(columns, device=logits.device)
            hidden = (ids >= self.num_ids).expand_as(logits)
        if self.sampling.top_k or self.sampling.top_p < 1:
            cut = self._cut(logits, labels)
            hidden = cut if hidden is None else hidden | cut
        if self.sampling.temperature != 1:
            wide = torch.promote_types(logits.dtype, torch.float32)
            logits = logits.to(wide) / self.sampling.temperature
        if hidden is not None:
            logits = logits.masked_fill_(hidden, -torch.inf)
        return logits, None

    def backward(self, grad: Tensor, kept: Tensor | None) -> Tensor:
        """See `LogitsChange`. What is hidden has probability 0, and so its gradient is 0."""
        return grad if self.sampling.temperature == 1 else grad.div_(self.sampling.temperature)

    def _cut(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Which of my columns [t, V] top-k and top-p cut off."""
        cut = torch.empty_like(logits, dtype=torch.bool)
        size = max(1, _CUT_AT_A_TIME // self.vocab_size)
        for start in range(0, len(logits), size):
            some = slice(start, start + size)
            cut[some] = self._cut_some(logits[some], labels[some])
        return cut

    def _cut_some(self, logits: Tensor, labels: Tensor) -> Tensor:
        columns, group = logits.shape[1], self.group
        padded = F.pad(logits, (0, self.rows - columns))
        whole = gather_logits(padded, group, vocab_size=self.vocab_size)[:, : self.num_ids]
        kept = allowed_probabilities(whole, [self.sampling] * len(labels)) > 0
        kept.scatter_(1, labels[:, None], True)
        return ~F.pad(kept, (0, self.first + columns - self.num_ids))[:, self.first :]
