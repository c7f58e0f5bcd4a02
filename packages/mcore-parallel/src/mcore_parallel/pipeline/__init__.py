"""Pipeline parallelism: schedules as data, proofs and pictures of them, and one executor."""

from mcore_parallel.pipeline.actions import Action, Kind, Schedule, num_chunks, partner
from mcore_parallel.pipeline.channel import Channel, Message, Sending
from mcore_parallel.pipeline.check import check
from mcore_parallel.pipeline.executor import Around, PipelineError, StageFunction, run_schedule
from mcore_parallel.pipeline.schedules import SCHEDULES, gpipe, one_f_one_b
from mcore_parallel.pipeline.simulate import OpTimes, Simulation, Span, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Around",
    "Channel",
    "Kind",
    "Message",
    "OpTimes",
    "PipelineError",
    "Schedule",
    "Sending",
    "Simulation",
    "Span",
    "StageFunction",
    "check",
    "gpipe",
    "num_chunks",
    "one_f_one_b",
    "partner",
    "run_schedule",
    "simulate",
]
