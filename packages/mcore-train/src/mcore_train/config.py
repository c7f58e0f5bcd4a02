"""Everything one training run is told, as one checked value.

Architecture, parallelism and kernels are the configs of their own packages; here they are joined
with data, batch, optimizer, schedule and the things around the loop. A `TrainConfig` that exists
has been checked as a whole: nothing is built from one that is wrong.
"""

import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from mcore_kernels import KernelConfig
from mcore_models import ModelConfig
from mcore_models.adapters import LoRAConfig
from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import ParallelConfig, check_sequence
from mcore_train.checkpoint_config import CheckpointConfig
from mcore_train.checks import require as _require
from mcore_train.data_config import BatchConfig, DataConfig
from mcore_train.denoising import check_denoising
from mcore_train.low_precision import LowPrecisionConfig
from mcore_train.optim.scaler import LossScaleConfig

Precision = Literal["fp32", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda"]
OptimizerKind = Literal["adamw", "sgd"]
ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]

_DISPATCHER: Final = ParallelConfig().dispatcher


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What training adds to the cross-entropy of a token; validation leaves it out.

    `label_smoothing` α gives the label 1 - α and spreads α over all other tokens. `z_loss` λ adds
    λ · (log Σ exp z)², which keeps logits from drifting. Head and loss are computed together, of
    `chunk_tokens` tokens at a time: more are faster, fewer take less memory; None is as many as
    have 1 GiB of logits on a rank.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        smoothing = self.label_smoothing
        _require(
            0 <= smoothing < 1, f"label_smoothing={smoothing} must lie in 0 <= label_smoothing < 1"
        )
        _require(0 <= self.z_loss < math.inf, f"z_loss={self.z_loss} must be at least 0 and finite")
        _require(
            self.chunk_tokens is None or self.chunk_tokens > 0,
            f"chunk_tokens={self.chunk_tokens} must be at least 1, or null",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule. Norms and biases take no weight decay.

    `momentum` is SGD's; `beta1` and `beta2` are AdamW's, and so is `eps`.
    """

    kind: OptimizerKind = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"{name}={value} must lie in 0 <= {name} < 1")
        _require(
            self.kind == "sgd" or self.momentum == 0,
            f"momentum={self.momentum} is SGD's: use beta1, or kind sgd",
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(
                self.kind == "adamw" or value == getattr(OptimizerConfig, name),
                f"{name}={value} is AdamW's: use momentum, or kind adamw",
            )
        _require(self.eps > 0, f"eps={self.eps} must be greater than 0")
        _require(self.weight_decay >= 0, f"weight_decay={self.weight_decay} must be at least 0")
        clip = self.clip_norm
        _require(clip is None or clip > 0, f"clip_norm={clip} must be greater than 0, or null")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate as a function of the step alone (see `mcore_train.schedules`).

    `decay_steps` counts the steps after warm-up in which the rate falls from `lr` to `min_lr`;
    None means all that are left (for `wsd`: the last fifth of the run).
    """

    kind: ScheduleKind = "cosine"
    lr: float = 2e-3
    min_lr: float = 2e-4
    warmup_steps: int = 0
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        _require(0 < self.lr < math.inf, f"lr={self.lr} must be greater than 0 and finite")
        _require(
            0 <= self.min_lr <= self.lr,
            f"min_lr={self.min_lr} must lie in 0 <= min_lr <= lr={self.lr}",
        )
        _require(self.warmup_steps >= 0, f"warmup_steps={self.warmup_steps} must be at least 0")
        decay = self.decay_steps
        _require(decay is None or decay >= 1, f"decay_steps={decay} must be at least 1, or null")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Validation over `windows` fixed samples.

    Every `interval` steps, at the end, and with `at_start` before the first step.
    """

    interval: int | None = None
    windows: int = 32
    at_start: bool = False

    def __post_init__(self) -> None:
        interval = self.interval
        _require(interval is None or interval >= 1, f"interval={interval} must be at least 1")
        _require(self.windows >= 1, f"windows={self.windows} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """`directory` receives `metrics.jsonl`, the loss curve and the TensorBoard events."""

    directory: Path | None = None
    interval: int = 10
    tensorboard: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        _require(self.interval >= 1, f"interval={self.interval} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    `precision` is that of weights and activations in forward and backward passes; masters and
    moments are fp32. `loss_scale` is for fp16. `builders` is the import path, `module:NAME`, of the
    builders of parts of one's own, by pattern letter (`mcore_models.build_model`). `freeze` are
    patterns of names of global tensors that are not trained (`mcore_models.freeze`). With `lora`
    low-rank adapters are trained, and nothing else (`mcore_models.adapters`). With `low_precision`
    linear layers multiply in few bits.

    Raises:
        ValueError: one line with the place, the numbers and the nearest valid values.
    """

    model: ModelConfig
    steps: int
    seed: int = 1234
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    log: LogConfig = field(default_factory=LogConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    precision: Precision = "fp32"
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    device: Device = "auto"
    builders: str | None = None
    freeze: tuple[str, ...] = ()
    lora: LoRAConfig | None = None
    low_precision: LowPrecisionConfig | None = None

    def __post_init__(self) -> None:
        _require(self.steps >= 1, f"steps={self.steps} must be at least 1")
        _require(self.seed >= 0, f"seed={self.seed} must be at least 0")
        check_sequence(self.parallel, self.data.seq_length)
        if self.data.spans is not None:
            check_sequence(self.parallel, self.data.spans.target_length)
        self.recompute.check(self.model, self.parallel)
        if self.low_precision is not None:
            self.low_precision.check(self.model)
        model, data = self.model, self.data
        check_denoising(model.family, data)
        _require(
            model.position != "learned" or data.seq_length <= model.max_positions,
            f"data.seq_length={data.seq_length} exceeds model.max_positions={model.max_positions}"
            f" of learned positions: use seq_length {model.max_positions} or less",
        )
        lanes, dispatcher = self.parallel.lanes, self.parallel.dispatcher
        asked = f"parallel.lanes={lanes}" if lanes > 1 else f"parallel.dispatcher={dispatcher}"
        _require(
            bool(model.layers_with("E")) or (lanes == 1 and dispatcher == _DISPATCHER),
            f"{asked} is for tokens on their way to experts, and the model has none: use "
            + ("1" if lanes > 1 else _DISPATCHER),
        )
        _require(
            bool(model.layers_with("E")) or not self.parallel.overlap_expert_exchange,
            "parallel.overlap_expert_exchange is for tokens on their way to experts, and the model "
            "has none: leave it out",
        )
        _require(
            self.precision == "fp16" or self.loss_scale == LossScaleConfig(),
            f"loss_scale does nothing: it is for precision fp16, and precision={self.precision}",
        )
        schedule = self.schedule
        _require(
            schedule.warmup_steps <= self.steps,
            f"schedule.warmup_steps={schedule.warmup_steps} exceeds steps={self.steps}: "
            f"use {self.steps} or less",
        )

    def check_world(self, world_size: int) -> "WorldPlan":
        """Check what depends on the number of processes, before anything is built.

        Returns:
            The resolved parallel config and the micro-batches per replica and step.

        Raises:
            ValueError: the world does not fit the layout, or the global batch the replicas.
        """
        parallel = self.parallel.resolve(world_size)
        assert parallel.dp is not None
        unit = self.batch.micro_size * parallel.dp
        final = self.batch.global_size
        for size in (final, *self.batch.possible_sizes()):
            if size % unit == 0:
                continue
            below = size // unit * unit
            near = f"{below} or {below + unit}" if below else str(unit)
            name, advice = f"batch.global_size={size}", f"global_size {near}"
            if size != final:
                name = f"the size {size} on the way to batch.global_size={final}"
                advice = near
            raise ValueError(
                f"{name} is not a multiple of batch.micro_size="
                f"{self.batch.micro_size} x dp={parallel.dp} = {unit}: use {advice}"
            )
        layers, stacks = self.model.total_layers, "" if self.model.t5 is None else " of both stacks"
        if layers < parallel.pp and parallel.stage_layers is None:
            raise ValueError(
                f"model.num_layers={layers}{stacks} is fewer than pp={parallel.pp}: "
                f"use pp {layers} or less"
            )
        parallel.place_layers(layers)
        _require(
            final > unit or not parallel.overlap_expert_exchange,
            f"parallel.overlap_expert_exchange needs another micro-batch to compute, and "
            f"batch.global_size={final} is one of each replica (micro_size x dp = {unit}): use "
            f"global_size {2 * unit} or more, or leave it out",
        )
        return WorldPlan(parallel=parallel, micro_batches=final // unit)


@dataclass(frozen=True, kw_only=True)
class WorldPlan:
    """What a config becomes on a world of a given size.

    `micro_batches` are those of a replica and step, when the batch has its final size.
    """

    parallel: ParallelConfig
    micro_batches: int


def nearest(name: str, choices: list[str]) -> str:
    """The member of `choices` that reads most like `name`."""
    return difflib.get_close_matches(name, choices, n=1, cutoff=0.0)[0]
