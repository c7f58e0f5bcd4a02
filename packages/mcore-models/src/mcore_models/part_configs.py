"""The names of `mcore_models.parts`, where they were before."""

from mcore_models.parts import TRAINING_FIELDS, BalanceScope, MambaConfig, MoEConfig, ScoreFunction

__all__ = ["TRAINING_FIELDS", "BalanceScope", "MambaConfig", "MoEConfig", "ScoreFunction"]
