"""Learning rates as pure functions of the step.

Nothing about the rate is stored in a checkpoint: it follows from the config and the step, so a
changed config takes effect at the first step after a resume.
"""

import math

from mcore_train.config import ScheduleConfig


def learning_rate(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """The rate used by optimizer step `step` (0-based) of a run of `total_steps`.

    Warm-up rises linearly and reaches `lr` at step `warmup_steps`; after it, with x the fraction of
    the decay that is done (0 at its first step, 1 after `decay_steps` steps and from then on):

    * cosine: min_lr + (lr − min_lr)·(1 + cos πx)/2 (Loshchilov & Hutter, 2017)
    * linear: lr + (min_lr − lr)·x
    * wsd: `lr` until the last `decay_steps` of the run, then linear (Hu et al., MiniCPM, 2024)
    * constant: `lr`
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.kind == "constant":
        return config.lr
    left = max(total_steps - warmup, 1)
    if config.kind == "wsd":
        decay = min(config.decay_steps or max(left // 5, 1), left)
        start = total_steps - decay
    else:
        decay = config.decay_steps or left
        start = warmup
    x = min(max((step - start) / decay, 0.0), 1.0)
    if config.kind == "cosine":
        return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * x)) / 2
    return config.lr + (config.min_lr - config.lr) * x
