"""What modules of the model keep beside their parameters, in the checkpoints of a run.

A module says what that is by `extra_state` and `load_extra_values` (`mcore_parallel.extra`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.extra import collect_extra, restore_extra
from mcore_parallel import Group, ParallelMesh, all_gather_object
from mcore_parallel.extra import ExtraState, KeepsState
from mcore_parallel.layout import LayoutTensor
from mcore_train.session import Session


def state_tensors(session: Session) -> dict[str, LayoutTensor]:
    """Return all tensors of a run on this rank, to save or to fill: no copies.

    They are the optimizer's (weights, moments) and `extra/…`, what modules keep.
    """
    return {**session.optimizer.state_tensors(), **_collect(session)[0]}


def _collect(session: Session) -> tuple[dict[str, LayoutTensor], dict[str, Any]]:
    mesh = session.mesh

    def copies(state: ExtraState) -> Group:
        return mesh.edp if state.expert else mesh.dp_cp

    return collect_extra(_keepers(session), copies=copies)


def extra_values(session: Session) -> dict[str, Any]:
    """Return what modules keep that is no tensor, of all pipeline stages; communicates over pp."""
    _, values = _collect(session)
    return _joined(values, session.mesh)


def restore_values(session: Session, values: Mapping[str, Any], *, strict: bool) -> tuple[str, ...]:
    """Give the modules back their values; return what did not fit, the same on every rank.

    Communicates over pp.

    Raises:
        ValueError: on every rank: strict, and something does not fit.
    """
    keepers = _keepers(session)
    everywhere = _joined(dict.fromkeys(keepers), session.mesh)
    return restore_extra(keepers, values, strict=strict, everywhere=everywhere)


def _keepers(session: Session) -> dict[str, KeepsState]:
    modules = session.model.named_modules()
    return {name: module for name, module in modules if isinstance(module, KeepsState)}


def _joined(mine: dict[str, Any], mesh: ParallelMesh) -> dict[str, Any]:
    parts: list[dict[str, Any]] = all_gather_object(mine, mesh.pp.cpu)
    return {name: value for part in parts for name, value in part.items()}
