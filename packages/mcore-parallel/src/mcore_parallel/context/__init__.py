"""Context parallelism: the ranks of a group hold shares of every document and attend over all.

`SequenceSplit` says who holds which rows; `context_attention` gives one of four implementations of
`AttentionOp` over them. Everything else in a model works on single rows and needs no change, except
that parameters see different rows on each rank: their gradients are summed over the group.
"""

# Names are added in _public.py; they are imported when the first of them is asked for.
from typing import TYPE_CHECKING

from mcore_parallel._lazy import public_names

if TYPE_CHECKING:
    from mcore_parallel.context._public import *  # noqa: F403
else:
    __getattr__ = public_names(__name__)
