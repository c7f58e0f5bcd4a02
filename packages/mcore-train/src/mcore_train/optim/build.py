"""The update rule that a config names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mcore_kernels import Target, resolve
from mcore_kernels.config import AUTO
from mcore_parallel import SGD, UpdateRule
from mcore_train.optim.adamw import AdamW

if TYPE_CHECKING:
    from mcore_train.config import OptimizerConfig


def build_rule(config: OptimizerConfig, device: torch.device, *, adam: str = AUTO) -> UpdateRule:
    """Return the rule of `config.kind` with its hyper-parameters.

    `adam` names the operator (`KernelConfig.adam`); by default it is the fastest on a GPU, and
    elsewhere torch's own operators, one after another.
    """
    if config.kind == "sgd":
        return SGD(momentum=config.momentum)
    rule = AdamW(beta1=config.beta1, beta2=config.beta2, eps=config.eps)
    if device.type != "cuda" and adam == AUTO:
        return rule
    require = None if adam == AUTO else adam
    op = resolve("adam", target=Target.of(device, dtype=torch.float32), require=require)
    return replace(rule, op=op)
