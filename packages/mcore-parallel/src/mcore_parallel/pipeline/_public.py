"""The public names of the package, in one place; `mcore_parallel.pipeline` passes them on."""

from mcore_parallel.pipeline.actions import Action, Kind, Line, Schedule, num_chunks, with_messages
from mcore_parallel.pipeline.channel import Channel, Message, Sending
from mcore_parallel.pipeline.checker import check
from mcore_parallel.pipeline.executor import Around, PipelineError, StageFunction, run_schedule
from mcore_parallel.pipeline.schedules import (
    SCHEDULES,
    check_kind,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)
from mcore_parallel.pipeline.simulation import OpTimes, Simulation, Span, chunk_times, simulate
from mcore_parallel.pipeline.weights import DeferredGradients

__all__ = [
    "SCHEDULES",
    "Action",
    "Around",
    "Channel",
    "DeferredGradients",
    "Kind",
    "Line",
    "Message",
    "OpTimes",
    "PipelineError",
    "Schedule",
    "Sending",
    "Simulation",
    "Span",
    "StageFunction",
    "check",
    "check_kind",
    "chunk_times",
    "gpipe",
    "interleaved",
    "make_schedule",
    "num_chunks",
    "one_f_one_b",
    "run_schedule",
    "simulate",
    "with_messages",
    "zero_bubble",
    "zero_bubble_v",
]
