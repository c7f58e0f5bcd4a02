"""The update rule that a config names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_parallel import SGD, UpdateRule
from mcore_train.optim.adamw import AdamW

if TYPE_CHECKING:
    from mcore_train.config import OptimizerConfig


def build_rule(config: OptimizerConfig) -> UpdateRule:
    """Return the rule of `config.kind` with its hyper-parameters."""
    if config.kind == "sgd":
        return SGD(momentum=config.momentum)
    return AdamW(beta1=config.beta1, beta2=config.beta2, eps=config.eps)
