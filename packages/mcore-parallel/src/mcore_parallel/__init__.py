"""Meshes, layouts, collectives and every parallel axis of large-model training."""

from mcore_parallel.collectives import (
    all_gather,
    all_gather_into,
    all_gather_object,
    all_reduce,
    all_reduce_,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    copy_to_group,
    exchange,
    gather_from_group,
    gather_sequence,
    receive_into,
    reduce_from_group,
    reduce_scatter,
    reduce_scatter_into,
    reduce_scatter_sequence,
    scatter_to_group,
    send_to,
)
from mcore_parallel.config import ParallelConfig, check_sequence
from mcore_parallel.group import Group
from mcore_parallel.layout import Box, Fragment, LayoutTensor, TensorLayout
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.protocols import SGD, AttentionOp, LinearOp, UpdateRule, VocabLossOp
from mcore_parallel.rng import RngKey, RngStreams, counter_normal, counter_uniform, dropout
from mcore_parallel.spec import GradSync, Init, ParamSpec, initialise, param_specs
from mcore_parallel.stages import stage_layers

__all__ = [
    "SGD",
    "AttentionOp",
    "Box",
    "Fragment",
    "GradSync",
    "Group",
    "Init",
    "LayoutTensor",
    "LinearOp",
    "ParallelConfig",
    "ParallelMesh",
    "ParamSpec",
    "RngKey",
    "RngStreams",
    "TensorLayout",
    "UpdateRule",
    "VocabLossOp",
    "all_gather",
    "all_gather_into",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "check_sequence",
    "copy_to_group",
    "counter_normal",
    "counter_uniform",
    "dropout",
    "exchange",
    "gather_from_group",
    "gather_sequence",
    "initialise",
    "param_specs",
    "receive_into",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_into",
    "reduce_scatter_sequence",
    "scatter_to_group",
    "send_to",
    "stage_layers",
]
