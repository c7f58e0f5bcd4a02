"""One optimizer step: micro-batches in, one update and the numbers of it out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_models import GPT, AuxiliaryLosses, GlobalCounts, TokenBatch
from mcore_models.common.moe import ExpertLoads, adapt_routers, expert_loads, take_turns
from mcore_parallel import ParallelMesh, RngKey, all_reduce, clip_factor, run_schedule
from mcore_parallel.pipeline import (
    Action,
    DeferredGradients,
    Schedule,
    StageFunction,
    make_schedule,
)
from mcore_train.session import Session


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What a step did. `loss` is the mean over all valid tokens of the global batch, in nats.

    It has what `TrainConfig.loss` adds in it.

    `grad_norm` is the global L2 norm before clipping (in fp16 not finite where the step changed the
    scale of the loss instead of the weights), `stop` whether any rank asked to end, `extra`
    further numbers for the logs, by name: first of all the auxiliary losses of the layers, which
    were part of the gradient and are not in `loss`; then how uneven the loads of experts were.
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
    `tokens` are the valid tokens of the whole global batch, `loads` how those were spread over the
    experts of this stage.
    """

    loss: Tensor
    tokens: int
    auxiliary: Mapping[str, Tensor]
    loads: ExpertLoads = field(default_factory=ExpertLoads)

    def totals(self, mesh: ParallelMesh, *others: float) -> list[float]:
        """Return the values: loss, auxiliary losses, sums of `others`; reduces over mesh.world."""
        shares = [self.loss, *self.auxiliary.values(), *map(torch.tensor, others)]
        report = torch.stack([share.to(mesh.device, torch.float64) for share in shares])
        values: list[float] = all_reduce(report, mesh.world).tolist()
        return values


class _ScaledLosses(AuxiliaryLosses):
    """Auxiliary losses whose gradients are scaled as that of the loss is; the values are not."""

    def __init__(self, counts: GlobalCounts, names: Sequence[str], scale: float) -> None:
        super().__init__(counts, names)
        self._scale = scale

    def attach(
        self, hidden: Tensor, name: str, share: Tensor, value: Tensor | None = None
    ) -> Tensor:
        """Return `hidden`, in whose backward pass the share gets the scale as its gradient."""
        return super().attach(hidden, name, share * self._scale, share if value is None else value)


class Step:
    """Runs the pipeline schedule over micro-batches, then clips and updates.

    Loss rule: the sum over all valid tokens of the global batch divided by their number, so that
    neither loss nor gradient depends on micro-batching or on any parallel axis. Gradients are
    therefore summed over ranks, never averaged.
    """

    def __init__(self, session: Session, loss: StageLoss | None = None) -> None:
        self.session = session
        self.loss = _token_loss(session) if loss is None else loss
        self.schedules: dict[int, Schedule] = {}
        self.loads = ExpertLoads()
        self.weight_gradients = None
        if self.schedule(session.plan.micro_batches).splits_backward:
            self.weight_gradients = DeferredGradients(session.model.parameters())
        paired = session.mesh.config.overlap_expert_exchange
        self.turns = take_turns(session.model) if paired else None

    def schedule(self, micro_batches: int) -> Schedule:
        """The pipeline schedule of a step of so many micro-batches: a batch may grow."""
        if micro_batches not in self.schedules:
            self.schedules[micro_batches] = pipeline_schedule(self.session.mesh, micro_batches)
        return self.schedules[micro_batches]

    @property
    def scale(self) -> float:
        """By what the loss, and so every gradient, is multiplied."""
        return 1.0 if self.session.scaler is None else self.session.scaler.scale

    def accumulate(self, batches: list[TokenBatch], rng: RngKey) -> Accumulated:
        """Leave the gradient of the whole global batch, times `scale`, in the buckets."""
        session = self.session
        model, mesh = session.model.train(), session.mesh
        counts = count_all(batches, mesh)
        tokens = int(counts.tokens)
        auxiliary = model.auxiliary_losses(counts)
        scale = self.scale
        if scale != 1.0:
            auxiliary = _ScaledLosses(counts, auxiliary.names, scale)

        def loss(batch: TokenBatch, hidden: Tensor | None) -> Tensor:
            share = self.loss(model, batch, hidden, counts=counts, rng=rng, auxiliary=auxiliary)
            return share if scale == 1.0 else share * scale

        schedule = self.schedule(len(batches))
        session.buckets.zero()
        outputs = run_schedule(
            schedule[mesh.pp.rank],
            chunk_functions(model, mesh, loss, rng=rng, auxiliary=auxiliary),
            batches,
            session.channel,
            line=schedule.line,
            around=self._around,
            weight_gradients=self.weight_gradients,
            turns=self.turns,
        )
        session.buckets.finish()
        self.loads = expert_loads(model, auxiliary, mesh)
        return Accumulated(
            loss=loss_share(outputs, mesh) / scale,
            tokens=tokens,
            auxiliary=auxiliary.shares(),
            loads=self.loads,
        )

    def _around(self, action: Action, last: bool) -> AbstractContextManager[object]:
        """Tell the buckets which actions bring last gradients."""
        session = self.session
        if session.mesh.config.line.zigzag and session.config.model.embeds_at_end:
            # Both chunks of a stage may bring gradients of the embedding.
            last = last and action.chunk == 0
        return session.buckets.around(action, last)

    def update(self, lr: float) -> float:
        """Clip and update from the accumulated gradient; return its norm before clipping.

        Nothing is updated when the norm is not finite, but the scale of the loss in fp16.
        """
        optimizer, clip = self.session.optimizer, self.session.config.optimizer.clip_norm
        scale = self.scale
        norm = optimizer.grad_norm() / scale
        if math.isfinite(norm):
            factor = 1.0 if clip is None else clip_factor(norm, clip)
            optimizer.step(lr, grad_scale=factor / scale)
            adapt_routers(self.session.model, self.loads)
        if self.session.low_precision is not None:
            self.session.low_precision.advance()
        if self.session.scaler is not None:
            self.session.scaler.update(finite=math.isfinite(norm))
        return norm

    def __call__(
        self, batches: list[TokenBatch], *, lr: float, rng: RngKey, stop: bool = False
    ) -> StepMetrics:
        """Run one step on this rank's micro-batches (the same on every rank of a replica).

        Raises:
            FloatingPointError: loss or gradient is not finite; names the first such gradient. No
                parameter has been changed. In fp16 a gradient may be so now and then: the step
                then only lowers the scale of the loss, until that cannot be lower.
        """
        mesh, scaler = self.session.mesh, self.session.scaler
        shares = self.accumulate(batches, rng)
        imbalance = shares.loads.imbalance(mesh, self.session.config.model.layers_with("E"))
        loss, *extra, stops = shares.totals(mesh, *imbalance.values(), float(stop))
        if not math.isfinite(loss):
            raise FloatingPointError(self._not_finite(loss, self.session.optimizer.grad_norm()))
        can_be_lower = scaler is not None and not scaler.is_least
        scaling = {} if scaler is None else {"loss_scale": scaler.scale}
        norm = self.update(lr)
        if not math.isfinite(norm) and not can_be_lower:
            raise FloatingPointError(self._not_finite(loss, norm))
        return StepMetrics(
            loss=loss,
            tokens=shares.tokens,
            grad_norm=norm,
            lr=lr,
            stop=stops > 0,
            extra=dict(zip((*shares.auxiliary, *imbalance), extra, strict=True)) | scaling,
        )

    def _not_finite(self, loss: float, norm: float) -> str:
        found = self.session.optimizer.find_nonfinite()
        where = "no gradient alone is" if found is None else f"the first such gradient is {found}"
        update = self.session.optimizer.step_count + 1
        return f"update {update}: loss {loss} and gradient norm {norm} are not both finite: {where}"


def _token_loss(session: Session) -> StageLoss:
    """The model's own loss, with what the config adds to it."""
    config = session.config.loss
    return partial(
        GPT.loss,
        label_smoothing=config.label_smoothing,
        z_loss=config.z_loss,
        chunk_tokens=config.chunk_tokens,
        unit_gradient=session.scaler is None,  # otherwise multiplied before the backward pass
    )


def evaluate(session: Session, name: str = "validation") -> float:
    """Return the mean loss over all valid tokens of a validation set; all ranks call it."""
    mesh, model = session.mesh, session.model
    batches = session.data.validation_batches(name)
    counts = count_all(batches, mesh)

    def loss(batch: TokenBatch, hidden: Tensor | None) -> Tensor:
        chunk_tokens = session.config.loss.chunk_tokens
        return model.loss(batch, hidden, counts=counts, chunk_tokens=chunk_tokens)

    model.eval()
    outputs = run_forward(session, model, batches, loss) if batches else []
    model.train()
    return float(all_reduce(loss_share(outputs, mesh).to(mesh.device), mesh.world))


def run_forward(
    session: Session, model: GPT, batches: Sequence[Any], last: StageFunction[Any]
) -> list[Tensor]:
    """Return what `last` makes of each micro-batch at the end of the model; no graph is recorded.

    An empty list where the end of the model is not. `last(batch, hidden)` runs the last chunk, with
    `model.stage_forward` or `model.loss`. All ranks of the mesh call it; it communicates over pp.
    """
    schedule = pipeline_schedule(session.mesh, len(batches))
    return run_schedule(
        schedule[session.mesh.pp.rank],
        chunk_functions(model, session.mesh, last),
        batches,
        session.channel,
        line=schedule.line,
        forward_only=True,
    )


def chunk_functions(
    model: GPT, mesh: ParallelMesh, last: StageFunction[Any], **options: Any
) -> list[StageFunction[Any]]:
    """The function of each chunk of this stage: `stage_forward` with `options`, at the end `last`.

    `options` are those of `GPT.stage_forward`.
    """
    functions: list[StageFunction[Any]] = [
        partial(model.stage_forward, chunk=chunk, **options) for chunk in range(len(model.chunks))
    ]
    return [*functions[:-1], last] if mesh.is_last_stage else functions


def pipeline_schedule(mesh: ParallelMesh, micro_batches: int) -> Schedule:
    """The schedule that the layout asks for."""
    config = mesh.config
    return make_schedule(
        config.schedule,
        mesh.pp.size,
        micro_batches,
        chunks=config.chunks,
        group_size=config.microbatch_group,
        paired=config.overlap_expert_exchange,
    )


def stage_actions(mesh: ParallelMesh, micro_batches: int) -> Sequence[Action]:
    """The actions of this rank's pipeline stage."""
    return pipeline_schedule(mesh, micro_batches)[mesh.pp.rank]


def count_all(batches: list[TokenBatch], mesh: ParallelMesh) -> GlobalCounts:
    """What counts in the losses of the global batch; reduces over dp and cp."""
    labels = [batch.document_labels for batch in batches if batch.document_labels is not None]
    documents = 0.0
    if labels:
        mine = torch.stack([(label >= 0).sum(dtype=torch.float64) for label in labels]).sum()
        documents = float(all_reduce(mine, mesh.dp_cp))
    return GlobalCounts(tokens=count_tokens(batches, mesh), documents=documents)


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
