"""Everything around the loop: each callback owns one concern and its state."""

from mcore_train.callbacks.base import Callback
from mcore_train.callbacks.checkpoint import SaveCheckpoints
from mcore_train.callbacks.evaluate import Evaluate
from mcore_train.callbacks.log import MetricsLog, Progress, read_metrics
from mcore_train.callbacks.signals import StopOnSignal

__all__ = [
    "Callback",
    "Evaluate",
    "MetricsLog",
    "Progress",
    "SaveCheckpoints",
    "StopOnSignal",
    "read_metrics",
]
