"""Fill in the middle: documents whose middle is moved to the end (Bavarian et al. 2022).

A document cut at random into prefix, middle and suffix becomes, with the ids that mark the parts,

    PSM:  <prefix> prefix <suffix> suffix <middle> middle
    SPM:  <prefix> <suffix> suffix <middle> prefix middle
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.gpt import GPTDataset


@dataclass(frozen=True, kw_only=True)
class FIMConfig:
    """How documents are rearranged.

    Attributes:
        prefix_id, middle_id, suffix_id: ids that mark the parts.
        rate: share of documents that are rearranged.
        spm_rate: share of those that take the form SPM, the others take PSM.

    Raises:
        ValueError: a rate outside 0 to 1, or ids that are not three.

    """

    prefix_id: int
    middle_id: int
    suffix_id: int
    rate: float = 0.5
    spm_rate: float = 0.5

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"fim {name} is {getattr(self, name)}, it must lie in 0 to 1")
        ids = (self.prefix_id, self.middle_id, self.suffix_id)
        if min(ids) < 0 or len(set(ids)) < 3:
            raise ValueError(f"fim ids {ids} must be three different ones")


def fill_in_the_middle(
    tokens: NDArray[np.int64], config: FIMConfig, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return one document [n] rearranged, [n + 3], or, by chance, as it is."""
    if not len(tokens) or rng.random() >= config.rate:
        return tokens
    cuts = np.sort(rng.integers(0, len(tokens) + 1, 2))
    prefix, middle, suffix = np.split(tokens, cuts)
    head, tail, mark = [config.prefix_id], [config.suffix_id], [config.middle_id]
    if rng.random() < config.spm_rate:
        return np.concatenate([head, tail, suffix, mark, prefix, middle])
    return np.concatenate([head, prefix, tail, suffix, mark, middle])


class FIMDataset(GPTDataset):
    """Samples of a `GPTDataset` whose documents are rearranged, at random but the same each time.

    Documents are the stretches of a sample between EOD tokens, which keep their place. A sample
    keeps its length: what the marks push out at its end is cut off.

    Args:
        args, options: as for `GPTDataset`.
        fim: how to rearrange.
        fim_seed: seed of the cuts, with the sample's number.

    """

    def __init__(self, *args: Any, fim: FIMConfig, fim_seed: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fim = fim
        self.fim_seed = fim_seed

    def text(self, index: int) -> NDArray[np.int64]:
        """Return the rearranged tokens of sample `index`, as many as `GPTDataset.text`."""
        tokens = super().text(index)
        rng = np.random.default_rng((self.fim_seed, index))
        ends = [] if self.eod_id is None else np.flatnonzero(tokens == self.eod_id).tolist()
        parts: list[NDArray[np.int64]] = []
        start = 0
        for end in [*ends, len(tokens)]:
            parts += [fill_in_the_middle(tokens[start:end], self.fim, rng), tokens[end : end + 1]]
            start = end + 1
        return np.concatenate(parts)[: len(tokens)]
