"""The optimizer over gradient buckets: fp32 master weights and state, one shard for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mcore_parallel.collectives import Work
from mcore_parallel.data.ddp import GradientBuckets
from mcore_parallel.data.norm import (
    NonFinite,
    copies_of_counted,
    counted_views,
    first_nonfinite,
    global_norm,
)
from mcore_parallel.data.shard import HyperRule, Shard, decay
from mcore_parallel.data.share import Piece
from mcore_parallel.layout import LayoutTensor
from mcore_parallel.protocols import UpdateRule


class ShardedOptimizer:
    """An update rule applied to the parameters of `GradientBuckets`.

    Each rank updates the shard of each bucket that it owns and the ranks gather the result; without
    `mesh.config.sharding` every rank updates everything. The rule works on fp32 masters; a
    parameter that is fp32 (or fp64) already is its own master. With the partition `flat` the rule
    sees flat ranges that may run over several parameters of equal `Hyper`, with `whole` it sees
    parameters in their own shape.

        norm = optimizer.grad_norm()
        if math.isfinite(norm):
            optimizer.step(lr, grad_scale=clip_factor(norm, 1.0))

    buckets: their gradients must be summed (`finish()`) for `grad_norm` and `step`.
    rule: see `UpdateRule`. hyper: see `Hyper`; by default nothing decays.
    """

    def __init__(
        self, buckets: GradientBuckets, rule: UpdateRule, *, hyper: HyperRule | None = None
    ) -> None:
        self.buckets = buckets
        self.rule = rule
        self.step_count = 0
        hyper = hyper or decay(0.0)
        self._shards = [Shard(share, rule, hyper) for share in buckets.shares]
        self._counted = [view for share in buckets.shares for view in counted_views(share)]
        self._copies = [view for share in buckets.shares for view in copies_of_counted(share)]
        self._gathers: dict[int, Work] = {}  # by bucket: what `wait` still has to wait for
        self._lazy: set[int] = set()  # buckets that modules wait for themselves

    def grad_norm(self) -> float:
        """Return the 2-norm of the gradient of the whole model, equal on every rank.

        Every global element counts once, whatever holds copies of it: replicas over tensor
        parallelism, tied parameters, data parallelism. Summed in fp64 over mesh.world. Not finite
        exactly when some gradient is not, a copy that does not count included (or the fp32 sum
        overflowed already).
        """
        self.buckets.require_finished("grad_norm()")
        return global_norm(self._counted, self.buckets, copies=self._copies)

    def find_nonfinite(self) -> NonFinite | None:
        """Return the first gradient, by global name, with NaN or infinity; the same everywhere.

        For when `grad_norm()` is not finite. Communicates over mesh.world.
        """
        self.buckets.require_finished("find_nonfinite()")
        return first_nonfinite(self.buckets)

    @torch.no_grad()
    def step(self, lr: float, *, grad_scale: float = 1.0) -> None:
        """Update all parameters from the summed gradients, multiplied by `grad_scale` (clipping).

        What the gradients are afterwards is the rule's affair. Communicates over dp_cp and edp when
        sharded; with `mesh.config.overlap` the gathering of a bucket runs while the next one is
        updated, and see `gather_on_use`.
        """
        self.buckets.require_finished("step()")
        self.wait()
        self.step_count += 1
        for index in self._in_order_of_use():
            shard = self._shards[index]
            shard.update(lr, grad_scale, self.step_count)
            self._gather(index)
        self.buckets.written()
        self._mark_changed()
        self._wait_for(set(self._gathers) - self._lazy)

    def gather_on_use(self, modules: Iterable[nn.Module]) -> None:
        """Let updated parameters arrive while the next forward already runs.

        After this, `step()` does not wait for buckets all of whose parameters belong to `modules`;
        each module waits for its own parameters when it is called. Only for modules whose
        parameters nothing else reads (layers, but no embedding whose weight the head uses). Does
        nothing without `mesh.config.overlap`.
        """
        if not self.buckets.mesh.config.overlap:
            return
        home = {
            id(slot.param): index
            for index, share in enumerate(self.buckets.shares)
            for slot in share.slots
        }
        covered: set[int] = set()
        for module in modules:
            used = {home[id(param)] for param in module.parameters() if id(param) in home}
            covered |= {id(param) for param in module.parameters()}
            module.register_forward_pre_hook(self._waiter(used))
        self._lazy |= {
            index
            for index, share in enumerate(self.buckets.shares)
            if all(id(slot.param) in covered for slot in share.slots)
        }

    def wait(self) -> None:
        """Return when all parameters are up to date."""
        self._wait_for(set(self._gathers))

    # --- state --------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, LayoutTensor]:
        """Return this rank's masters and optimizer state by local key, as views to save or fill.

        Global names are those of the parameters with a prefix: `model/` for the fp32 master (the
        parameter itself where it is one, and for frozen parameters), and the state names of the
        rule, such as `exp_avg/`. Replicas over data parallelism are counted in the layouts. After
        filling them call `load_finished()`.
        """
        self.wait()
        found: dict[str, LayoutTensor] = {}
        for shard in self._shards:
            for piece, tensors in shard.tensors():
                for kind, tensor in tensors.items():
                    found[f"{kind}/{piece.slot.name}"] = _named(kind, tensor, piece)
        for name, held in self.buckets.frozen().items():
            found[f"model/{name}"] = LayoutTensor(
                held.tensor, held.layout.renamed(_prefixed("model"))
            )
        return found

    def load_finished(self) -> None:
        """Make the parameters what the masters now are; every rank calls it after loading.

        Communicates over dp_cp and edp when sharded.
        """
        self.wait()
        for index in self._in_order_of_use():
            self._shards[index].publish()
            self._gather(index)
        self.buckets.written()
        self._mark_changed()
        self.wait()

    def parameters_changed(self) -> None:
        """Make the masters what the parameters now are: after weights were loaded into these."""
        for shard in self._shards:
            shard.adopt()
        self._mark_changed()

    def state_dict(self) -> dict[str, Any]:
        """Return what is not a tensor, as JSON: the number of steps, and the rule's state names."""
        return {"step": self.step_count, "state_names": list(self.rule.state_names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`; ValueError when it belongs to a rule with other state."""
        if list(state["state_names"]) != list(self.rule.state_names):
            raise ValueError(
                f"the optimizer state holds {list(state['state_names'])}, this rule "
                f"({type(self.rule).__name__}) needs {list(self.rule.state_names)}"
            )
        self.step_count = int(state["step"])

    def _mark_changed(self) -> None:
        """Let torch see that the parameters have other values: they were written as parts of a
        bucket, or will be by a gather. A graph recorded with the old ones then refuses to go back,
        and whoever keeps something that is made of them can tell by `Tensor._version`.
        """
        increment_version([slot.param for share in self.buckets.shares for slot in share.slots])

    # --- gathering ----------------------------------------------------------------------------

    def _in_order_of_use(self) -> Iterator[int]:
        return reversed(range(len(self._shards)))

    def _gather(self, index: int) -> None:
        work = self._shards[index].share.gather()
        if work is None:
            return
        if self.buckets.mesh.config.overlap:
            self._gathers[index] = work
        else:
            work.wait()

    def _wait_for(self, indices: set[int]) -> None:
        for index in [index for index in self._gathers if index in indices]:
            self._gathers.pop(index).wait()

    def _waiter(self, indices: set[int]) -> Callable[[nn.Module, Any], None]:
        def wait(module: nn.Module, args: Any) -> None:
            self._wait_for(indices)

        return wait


def _named(kind: str, tensor: Tensor, piece: Piece) -> LayoutTensor:
    layout = piece.layout.renamed(_prefixed(kind))
    if piece.is_whole:
        shape = piece.slot.param.shape
        return LayoutTensor(tensor.view(shape), layout.reshaped(shape))
    return LayoutTensor(tensor, layout)


def _prefixed(kind: str) -> Callable[[str], str]:
    return lambda name: f"{kind}/{name}"
