"""What every format comes down to: stored tensors, and how a model's tensors are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.megatron.family import Family
from mcore_ckpt.sources import TensorSource
from mcore_ckpt.torchfile import fields
from mcore_parallel.mapping import Mapped, Resolved


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a checkpoint has.

    model: what its arguments describe, in the family's terms. source: the tensors as they are
    stored. weights, states: the model's tensors and the optimizer's, one for each layer and each
    expert, over those of `source`; states by kind. optimizer_step: how many it has made.
    """

    model: Any
    source: TensorSource
    weights: Resolved
    states: Mapping[str, Resolved]
    iteration: int
    optimizer_step: int | None
    consumed_samples: int | None


@dataclass(frozen=True, kw_only=True)
class Common:
    """What is kept once for all ranks. `args`: as they were stored; `rest`: everything else."""

    args: Mapping[str, Any]
    rest: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(value: Any, where: Path) -> Common:
        """Return the common state that a file holds.

        Raises:
            CheckpointError: it is none.
            ValueError: it has no arguments.
        """
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{where} holds a {type(value).__name__}, not a mapping")
        if value.get("args") is None:
            raise ValueError(
                f"{where} has no args: only checkpoints of Megatron-LM's training, which stores "
                f"its arguments, say what model they are of"
            )
        return Common(args=fields(value["args"]), rest=value)

    def model(self, family: Family, where: Path) -> Any:
        """Return the model that the arguments describe; ValueError names file and argument."""
        try:
            return family.read_args(self.args)
        except ValueError as error:
            raise ValueError(f"{where}: args: {error}") from None

    @property
    def iteration(self) -> int:
        """How many steps had been made."""
        return int(self.rest.get("iteration") or self.args.get("iteration") or 0)

    @property
    def consumed_samples(self) -> int | None:
        """How many samples training had consumed."""
        found = self.args.get("consumed_train_samples")
        return None if found is None else int(found)


def resolved(tensors: Mapping[str, Mapped]) -> Resolved:
    """Return tensors that are made by moving elements alone."""
    return Resolved(tensors=dict(tensors), steps={}, dropped=(), repeats={})


def step_of(value: Any) -> int | None:
    """Return the number of steps that an optimizer's state has, wherever it is below."""
    if isinstance(value, Mapping):
        own = value.get("step") if "exp_avg" in value else value.get("common_step")
        if own is not None:
            return int(own)
        groups = value.get("param_groups")
        if isinstance(groups, list):
            for group in groups:
                if isinstance(group, Mapping) and group.get("step") is not None:
                    return int(group["step"])
        for item in value.values():
            if (found := step_of(item)) is not None:
                return found
    elif isinstance(value, list | tuple):
        for item in value:
            if (found := step_of(item)) is not None:
                return found
    return None
