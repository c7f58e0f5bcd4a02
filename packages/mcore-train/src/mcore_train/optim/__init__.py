"""Update rules for `mcore_parallel`'s optimizer, and loss scaling."""

from mcore_train.optim.adamw import AdamW
from mcore_train.optim.build import build_rule
from mcore_train.optim.scaler import LossScaleConfig, LossScaler

__all__ = ["AdamW", "LossScaleConfig", "LossScaler", "build_rule"]
