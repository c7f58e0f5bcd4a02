"""Update rules for `mcore_parallel`'s optimizer."""

from mcore_train.optim.adamw import AdamW
from mcore_train.optim.build import build_rule

__all__ = ["AdamW", "build_rule"]
