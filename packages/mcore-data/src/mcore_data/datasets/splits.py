"""Split a corpus by document into training, validation and test parts."""

import math
from itertools import pairwise

_NAMES = ("training", "validation", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """Return the fractions of training, validation and test data, which sum to 1.

    `text` holds one to three weights separated by commas, such as `969,30,1`, `99,1` or
    `0.9, 0.1`; missing ones are 0. ValueError when a weight is no finite number or negative,
    when there are more than three, or when all are 0.
    """
    fields = text.split(",")
    if len(fields) > len(_NAMES):
        raise ValueError(
            f"split {text!r} has {len(fields)} weights, at most 3 are used "
            "(training, validation, test), for example '969,30,1'"
        )
    weights = []
    for name, field in zip(_NAMES, fields, strict=False):
        try:
            weight = float(field)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight) or weight < 0 or "_" in field:
            raise ValueError(
                f"split {text!r}: the {name} weight {field.strip()!r} is not a number >= 0, "
                "valid is for example '969,30,1'"
            )
        weights.append(weight)
    total = sum(weights)  # not fsum: boundaries agree with Megatron-LM's to the last bit
    if not 0 < total < math.inf:
        raise ValueError(f"split {text!r}: the weights sum to {total}, one must be above 0")
    training, validation, test = (w / total for w in weights + [0.0] * (3 - len(weights)))
    return training, validation, test


def document_ranges(split: str | tuple[float, float, float], num: int) -> tuple[range, ...]:
    """Return the ranges of documents of the three parts: disjoint, together 0 to `num`.

    Boundaries are the cumulative fractions times `num`, rounded half to even, which is how
    Megatron-LM cuts.
    """
    fractions = parse_split(split) if isinstance(split, str) else split
    bounds = [0.0]
    for fraction in fractions:
        bounds.append(bounds[-1] + fraction)
    cuts = [round(bound * float(num)) for bound in bounds]
    return tuple(range(a, b) for a, b in pairwise(cuts))
