"""One optimizer step: micro-batches in, one update and the numbers of it out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_models import GPT, AuxiliaryLosses, GlobalCounts, TokenBatch
from mcore_parallel import (
    Action,
    ParallelMesh,
    RngKey,
    all_reduce,
    clip_factor,
    one_f_one_b,
    run_schedule,
)
from mcore_train.session import Session


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What a step did. `loss` is the mean over all valid tokens of the global batch, in nats.

    `grad_norm` is the global L2 norm before clipping, `stop` whether any rank asked to end, `extra`
    further numbers for the logs, by name: first of all the auxiliary losses of the layers, which
    were part of the gradient and are not in `loss`.
    """

    loss: float
    tokens: int
    grad_norm: float
    lr: float
    stop: bool
    extra: Mapping[str, float] = field(default_factory=dict)


class StageLoss(Protocol):
    """What the last pipeline stage computes from a micro-batch; `GPT.loss` is one."""

    def __call__(
        self,
        model: GPT,
        batch: Any,
        hidden: Tensor | None = None,
        /,
        *,
        counts: GlobalCounts,
        rng: RngKey | None = None,
        auxiliary: AuxiliaryLosses | None = None,
    ) -> Tensor:
        """Return this micro-batch's share of the loss, a scalar, the same on all ranks of tp.

        Args:
            model: this stage; `stage_forward` runs it.
            batch: a `TokenBatch`, or a subclass that carries more.
            hidden: what the stage before returned.
            counts: totals over the global batch, by which sums are divided.
            rng: key of this step's dropout.
            auxiliary: for `stage_forward`: takes the losses of the layers.
        """
        ...


class TrainStep(Protocol):
    """What `Trainer` does with a batch of the data source: `Step`, or one that does more."""

    def __call__(self, batches: Any, *, lr: float, rng: RngKey, stop: bool = False) -> StepMetrics:
        """Change the weights once (or several times) and tell how it went; all ranks call it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """This rank's share of a step's losses; over the mesh the shares add up to the values.

    `loss` is a float64 scalar, and so is each of `auxiliary`, by name and in one order everywhere.
    `tokens` are the valid tokens of the whole global batch.
    """

    loss: Tensor
    tokens: int
    auxiliary: Mapping[str, Tensor]

    def totals(self, mesh: ParallelMesh, *others: float) -> list[float]:
        """Return the values: loss, auxiliary losses, sums of `others`; reduces over mesh.world."""
        shares = [self.loss, *self.auxiliary.values(), *map(torch.tensor, others)]
        report = torch.stack([share.to(mesh.device, torch.float64) for share in shares])
        values: list[float] = all_reduce(report, mesh.world).tolist()
        return values


class Step:
    """Runs the pipeline schedule over micro-batches, then clips and updates.

    Loss rule: the sum over all valid tokens of the global batch divided by their number, so that
    neither loss nor gradient depends on micro-batching or on any parallel axis. Gradients are
    therefore summed over ranks, never averaged.
    """

    def __init__(self, session: Session, loss: StageLoss = GPT.loss) -> None:
        self.session = session
        self.loss = loss
        self.actions = stage_actions(session.mesh, session.plan.micro_batches)

    def accumulate(self, batches: list[TokenBatch], rng: RngKey) -> Accumulated:
        """Leave the gradient of the whole global batch in the buckets."""
        session = self.session
        model, mesh = session.model.train(), session.mesh
        tokens = count_tokens(batches, mesh)
        counts = GlobalCounts(tokens=tokens)
        auxiliary = model.auxiliary_losses(counts)

        def stage(batch: TokenBatch, hidden: Tensor | None) -> Tensor:
            if mesh.is_last_stage:
                return self.loss(model, batch, hidden, counts=counts, rng=rng, auxiliary=auxiliary)
            return model.stage_forward(batch, hidden, rng=rng, auxiliary=auxiliary)

        session.buckets.zero()
        outputs = run_schedule(
            self.actions, stage, batches, session.channel, around=session.buckets.around
        )
        session.buckets.finish()
        return Accumulated(
            loss=loss_share(outputs, mesh), tokens=tokens, auxiliary=auxiliary.shares()
        )

    def update(self, lr: float) -> float:
        """Clip and update from the accumulated gradient; return its norm before clipping.

        Nothing is updated when the norm is not finite.
        """
        optimizer, clip = self.session.optimizer, self.session.config.optimizer.clip_norm
        norm = optimizer.grad_norm()
        if math.isfinite(norm):
            optimizer.step(lr, grad_scale=1.0 if clip is None else clip_factor(norm, clip))
        return norm

    def __call__(
        self, batches: list[TokenBatch], *, lr: float, rng: RngKey, stop: bool = False
    ) -> StepMetrics:
        """Run one step on this rank's micro-batches (the same on every rank of a replica).

        Raises:
            FloatingPointError: loss or gradient is not finite; names the first such gradient. No
                parameter has been changed.
        """
        mesh = self.session.mesh
        shares = self.accumulate(batches, rng)
        loss, *auxiliary, stops = shares.totals(mesh, float(stop))
        if not math.isfinite(loss):
            raise FloatingPointError(self._not_finite(loss, self.session.optimizer.grad_norm()))
        norm = self.update(lr)
        if not math.isfinite(norm):
            raise FloatingPointError(self._not_finite(loss, norm))
        return StepMetrics(
            loss=loss,
            tokens=shares.tokens,
            grad_norm=norm,
            lr=lr,
            stop=stops > 0,
            extra=dict(zip(shares.auxiliary, auxiliary, strict=True)),
        )

    def _not_finite(self, loss: float, norm: float) -> str:
        found = self.session.optimizer.find_nonfinite()
        where = "no gradient alone is" if found is None else f"the first such gradient is {found}"
        return f"loss {loss} and gradient norm {norm} are not both finite: {where}"


def evaluate(session: Session) -> float:
    """Return the mean loss over all valid tokens of the validation windows; all ranks call it."""
    mesh, model = session.mesh, session.model
    batches = session.data.validation_batches()
    tokens = count_tokens(batches, mesh)
    counts = GlobalCounts(tokens=tokens)

    def stage(batch: TokenBatch, hidden: Tensor | None) -> Tensor:
        if mesh.is_last_stage:
            return model.loss(batch, hidden, counts=counts)
        return model.stage_forward(batch, hidden)

    model.eval()
    outputs: list[Tensor] = []
    if batches:
        actions = stage_actions(mesh, len(batches))
        outputs = run_schedule(actions, stage, batches, session.channel, forward_only=True)
    model.train()
    return float(all_reduce(loss_share(outputs, mesh).to(mesh.device), mesh.world))


def stage_actions(mesh: ParallelMesh, micro_batches: int) -> list[Action]:
    """The 1F1B actions of this rank's pipeline stage."""
    return one_f_one_b(mesh.pp.size, micro_batches)[mesh.pp.rank]


def count_tokens(batches: list[TokenBatch], mesh: ParallelMesh) -> int:
    """Valid tokens (sum of the loss masks) of the global batch; reduces over dp and cp."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in batches:
        assert batch.loss_mask is not None
        total += batch.loss_mask.sum(dtype=torch.float64)
    return round(float(all_reduce(total, mesh.dp_cp)))


def loss_share(outputs: list[Tensor], mesh: ParallelMesh) -> Tensor:
    """This rank's share of the loss: what the last stage computed, counted once over tp."""
    total = torch.zeros((), dtype=torch.float64)
    if mesh.is_last_stage and mesh.tp.rank == 0:
        for output in outputs:
            total += output.double().cpu()
    return total
