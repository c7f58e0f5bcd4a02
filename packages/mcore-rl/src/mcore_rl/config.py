"""Everything one reinforcement-learning run is told, as one checked value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mcore_inference import SamplingParams
from mcore_kernels import KernelConfig
from mcore_models import ModelConfig
from mcore_parallel import ParallelConfig
from mcore_rl.advantages import AdvantageKind
from mcore_rl.log_probs import LogProbKind
from mcore_rl.losses import GRPOLoss
from mcore_train import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)

Precision = Literal["fp32", "bf16"]
Device = Literal["auto", "cpu", "cuda"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Which environment, and its options by name.

    `mcore-rl environments` lists them; one of your own is named `package.module:Class`.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How the policy acts.

    Attributes:
        group_size: rollouts of each task; their rewards are compared with each other.
        max_tokens: tokens of an action at most.
        max_turns: actions of an episode at most.
        temperature, top_k, top_p: how tokens are drawn, see `mcore_inference.SamplingParams`.
        log_probs: which log-probabilities engine and trainer compare, see `LogProbs`.
        tp: ranks over which each engine cuts its model; the world makes world / tp engines, which
            share the tasks.
        precision: of the engine's weights; None is the trainer's.
        max_sequences, max_batch_tokens: what an engine runs at a time.
    """

    group_size: int = 8
    max_tokens: int = 64
    max_turns: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    log_probs: LogProbKind = "processed"
    tp: int = 1
    precision: Precision | None = None
    max_sequences: int = 256
    max_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_turns", "tp", "max_sequences", "max_batch_tokens"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        _require(
            self.group_size >= 2,
            f"group_size={self.group_size}: a rollout is compared with others of its task, use at "
            f"least 2",
        )
        _require(
            self.temperature > 0,
            f"temperature={self.temperature} must be greater than 0: a policy that does not vary "
            f"has nothing to compare",
        )
        self.sampling()

    def sampling(self) -> SamplingParams:
        """Return how tokens are drawn."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


@dataclass(frozen=True, kw_only=True)
class RolloutBatchConfig(BatchConfig):
    """Rollouts per step (over all replicas) and per forward pass of one replica."""

    global_size: int = 64
    micro_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ramp", "sizes"):
            _require(
                getattr(self, name) is None,
                f"batch.{name} is for batches of data: a step always plays global_size rollouts",
            )
        _require(
            self.last == "join",
            f"batch.last={self.last} is for epochs of data: tasks never end",
        )


@dataclass(frozen=True, kw_only=True)
class StepLogConfig(LogConfig):
    """`directory` receives `metrics.jsonl`, the reward curve and the TensorBoard events."""

    interval: int = 1


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """The mean reward on `tasks` tasks that are not trained on, one episode of each.

    Measured every `interval` steps, at the end, and with `at_start` before the first step; at
    temperature 0 the policy takes its most probable token.
    """

    tasks: int = 64
    interval: int | None = None
    at_start: bool = True
    temperature: float = 0.0

    def __post_init__(self) -> None:
        interval = self.interval
        _require(self.tasks >= 1, f"tasks={self.tasks} must be at least 1")
        _require(interval is None or interval >= 1, f"interval={interval} must be at least 1")
        SamplingParams(temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """One run of reinforcement learning.

    Sections that `TrainConfig` has too mean the same here, with these readings: a step plays
    `batch.global_size` rollouts and learns from all of them in each of `updates` passes, every one
    an optimizer step. `steps` and `schedule` count steps, not passes. `tokenizer` is `byte`, or
    where one lies; `advantages` how rewards of a group are compared (see `group_advantages`).

    Raises:
        ValueError: one line with the place, the numbers and the nearest valid values.
    """

    model: ModelConfig
    steps: int
    environment: EnvironmentConfig
    tokenizer: str = "byte"
    seed: int = 1234
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    batch: RolloutBatchConfig = field(default_factory=RolloutBatchConfig)
    advantages: AdvantageKind = "grpo"
    loss: GRPOLoss = field(default_factory=GRPOLoss)
    updates: int = 1
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: HeldOutConfig = field(default_factory=HeldOutConfig)
    log: StepLogConfig = field(default_factory=StepLogConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    precision: Precision = "fp32"
    device: Device = "auto"

    def __post_init__(self) -> None:
        size, group = self.batch.global_size, self.rollout.group_size
        if size % group:
            below = size // group * group
            near = f"{below} or {below + group}" if below else str(group)
            raise ValueError(
                f"batch.global_size={size} is not a multiple of rollout.group_size={group}: "
                f"use global_size {near}"
            )
        _require(self.updates >= 1, f"updates={self.updates} must be at least 1")
        _require(
            self.model.dropout == 0,
            f"model.dropout={self.model.dropout}: the policy that learns would not be the one that "
            f"acts: use 0",
        )
        self.training()

    @property
    def tasks_per_step(self) -> int:
        """Tasks that a step plays."""
        return self.batch.global_size // self.rollout.group_size

    def training(self) -> TrainConfig:
        """Return what the trainer is told: the sections in common, and no data of its own."""
        parallel = self.parallel
        return TrainConfig(
            model=self.model,
            steps=self.steps,
            seed=self.seed,
            parallel=parallel,
            # Rollouts take the place of data; a length that every layout can cut passes its checks.
            data=DataConfig(mock=True, seq_length=2 * parallel.cp * parallel.tp),
            batch=self.batch,
            optimizer=self.optimizer,
            schedule=self.schedule,
            checkpoint=self.checkpoint,
            log=self.log,
            kernels=self.kernels,
            precision=self.precision,
            device=self.device,
        )
