"""Data parallelism: gradients accumulate in flat buckets and are summed over the ranks."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from mcore_parallel.collectives import all_reduce_
from mcore_parallel.data.buckets import make_buckets
from mcore_parallel.data.main_grad import take_main_grad
from mcore_parallel.data.partition import Partition, flat
from mcore_parallel.data.reduction import Reduction, sum_copies
from mcore_parallel.data.share import Share, grads_of, reduction_group
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.pipeline.actions import Action
from mcore_parallel.spec import GradSync, ParamSpec


class GradientBuckets:
    """The gradients of some parameters: accumulated in fp32, then summed over the ranks.

    Parameters become views of flat buffers, and `data.main_grad(parameter)` is a view of another.
    When backward has accumulated a gradient, a hook adds it there and drops `.grad`; a layer that
    adds its weight gradient to it itself sets `parameter.grad_added_to_main` to True and hands
    autograd any tensor of the right shape. The parameters do not keep the buckets: whoever trains
    them does.

    Dense parameters are summed over `mesh.dp_cp`, expert ones over `mesh.edp`; nothing is divided
    (divide the loss by the global number of tokens). With `mesh.config.sharding` each rank gets the
    sum of its own shard only. A step is

        buckets.zero()
        for each micro-batch but the last:
            with buckets.no_sync():
                ...forward and backward
        ...forward and backward of the last
        buckets.finish()

    or `run_schedule(…, around=buckets.around)` in place of the middle. With `mesh.config.overlap`
    a bucket's reduction starts when its last gradient of the last micro-batch has arrived; without
    it, in `finish()`. The sums are bitwise the same, because the same buckets are reduced in the
    same order on every rank. A parameter that got no gradient counts as zero.

    With sharding "gradients" a rank keeps the sums of its shards only: every backward pass is
    reduced, inside `no_sync()` too, and so every rank makes equally many. Each has a `no_sync()` of
    its own; of several in one, a pass ends where some parameter gets its second gradient, which
    ranks must agree on. Buckets that wait for other sums (see `ParamSpec.grad_sync`) stay whole
    until `finish()`.

    params: by local name, in order of registration; those that need no gradient are only kept for
    checkpoints (`frozen`). specs: of all of them. partition: `flat` or `whole`.

    Raises:
        ValueError: a parameter has no spec or one of another shape; or parameters are to be
            sharded, which takes `data_parallel`.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        specs: Mapping[str, ParamSpec],
        mesh: ParallelMesh,
        *,
        partition: Partition = flat,
    ) -> None:
        check_specs(params, specs)
        self._check_sharding(mesh)
        self.mesh = mesh
        self.specs = dict(specs)
        self._params = dict(params)
        trained = {
            name: param
            for name, param in params.items()
            if param.requires_grad and not self._is_cut(param)
        }
        self.buckets = tuple(make_buckets(trained, specs, mesh, partition, order=list(params)))
        self.finished = False
        self._sync = True
        self._missing = [{slot.name for slot in bucket.slots} for bucket in self.buckets]
        # So many buckets, the first ones, are reduced in every backward pass.
        self._num_passing = sum(not bucket.gradients.kept for bucket in self.buckets)
        self._started = 0  # buckets whose reduction has started, in order
        self._under_way: list[Reduction] = []
        self._hooks = [
            slot.param.register_post_accumulate_grad_hook(self._hook(i, slot.name))  # type: ignore[no-untyped-call]
            for i, bucket in enumerate(self.buckets)
            for slot in bucket.slots
        ]

    @staticmethod
    def _check_sharding(mesh: ParallelMesh) -> None:
        if mesh.config.sharding == "parameters":
            raise ValueError(
                "sharding parameters changes the modules that use them: call "
                "data_parallel(model, …) in place of GradientBuckets(parameters, …)"
            )

    @staticmethod
    def _is_cut(param: nn.Parameter) -> bool:
        """Whether somebody else holds this parameter and its gradient."""
        return False

    @property
    def shares(self) -> tuple[Share, ...]:
        """What this rank owns, in the order in which gradients are expected."""
        return self.buckets

    def zero(self) -> None:
        """Set all gradients to zero and begin a new accumulation."""
        self._finish_reductions()  # an accumulation that was given up may still be under way
        for bucket, missing in zip(self.buckets, self._missing, strict=True):
            bucket.gradients.zero()
            missing.update(slot.name for slot in bucket.slots)
        self.finished = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only, from one backward pass: more of this step are to come."""
        before, self._sync = self._sync, False
        try:
            yield
            self._end_backward()
        finally:
            self._sync = before

    def around(self, action: Action, last: bool) -> AbstractContextManager[None]:
        """Return `no_sync()` for all but the last backward; made for `run_schedule`.

        Where weight gradients are actions of their own, a parameter's last gradient comes in the
        last B or in the last W of its chunk.
        """
        return self.no_sync() if action.kind in ("B", "W") and not last else nullcontext()

    def finish(self) -> None:
        """Return when every gradient is summed over all ranks that hold a part of it.

        Every rank of the mesh calls it after its last backward. Communicates over dp_cp and edp,
        and over the groups of the parameters' `grad_sync`.
        """
        if self.finished:
            raise RuntimeError("gradients are summed already: call zero() first")
        deferred = [bucket for bucket in self.buckets if bucket.deferred]
        self._start_up_to(len(self.buckets) - len(deferred))
        sum_ranges(
            (sync.group, slot.spec, sync, bucket.gradients.whole()[slice(*slot.range_of(sync))])
            for bucket in deferred
            for slot in bucket.slots
            for sync in slot.partial
        )
        self._start_up_to(len(self.buckets))
        self._finish_reductions()
        for work in [sum_copies(bucket) for bucket in self.buckets]:
            if work is not None:
                work.wait()
        self._sum_owned()
        self.finished = True

    def _sum_owned(self) -> None:
        # After the reduction, since then both copies of a tied parameter add the same two numbers,
        # whatever order the reduction added in.
        sum_ranges(
            (sync.group, slot.spec, sync, grads_of(bucket, *slot.range_of(sync)))
            for bucket in self.buckets
            for slot in bucket.slots
            for sync in slot.tied
        )

    def gradients(self) -> dict[str, LayoutTensor]:
        """Return this rank's part of the summed gradients, as views, by local key.

        Global names have the prefix `grad/`. RuntimeError before `finish()`.
        """
        self.require_finished("gradients()")
        return {
            f"grad/{piece.slot.name}": LayoutTensor(
                grads_of(share, piece.at, piece.end), piece.layout.renamed(lambda n: f"grad/{n}")
            )
            for share in self.shares
            for piece in share.pieces
        }

    def parameters(self) -> dict[str, LayoutTensor]:
        """Return what this rank holds of every parameter between steps, as views, by local name.

        In the dtype in which they are stored; replicas over data parallelism are counted. Wait for
        the optimizer first (`ShardedOptimizer.wait`).
        """
        found = {}
        for name, param in self._params.items():
            group = reduction_group(self.specs[name], self.mesh)
            layout = self.specs[name].layout.replicated(group.rank, group.size)
            found[name] = LayoutTensor(param.detach(), layout)
        return found

    def frozen(self) -> dict[str, LayoutTensor]:
        """Return those `parameters()` that are not trained."""
        fixed = {name for name, param in self._params.items() if not param.requires_grad}
        return {name: held for name, held in self.parameters().items() if name in fixed}

    def written(self) -> None:
        """Say that owned values were written: copies of parameters made from them are stale."""

    def require_finished(self, what: str) -> None:
        """Raise RuntimeError unless the gradients are summed."""
        if not self.finished:
            raise RuntimeError(f"{what} needs summed gradients: call finish() first")

    def close(self) -> None:
        """Take the hooks and attributes off the parameters, which stay views of the buckets."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for bucket in self.buckets:
            for slot in bucket.slots:
                del slot.param.main_grad, slot.param.grad_added_to_main  # type: ignore[attr-defined]

    def _hook(self, index: int, name: str) -> Callable[[Tensor], None]:
        # A hook belongs to the parameter where no garbage collector looks: one that held these
        # buckets, and so the parameter, would keep both and their groups for ever.
        reference = weakref.ref(self)

        def accumulate(param: Tensor) -> None:
            buckets = reference()
            if buckets is None:
                raise RuntimeError(
                    f"a gradient of {name} arrived after its buckets were dropped: keep them as "
                    f"long as their parameters are trained, or close() them"
                )
            buckets._accumulate(param, index, name)

        return accumulate

    def _accumulate(self, param: Tensor, index: int, name: str) -> None:
        """Take over the gradient of the parameter `name` in the bucket `index`."""
        if param.grad is None and not param.grad_added_to_main:  # type: ignore[attr-defined]
            return  # the operator keeps it for later (`DeferredGradients`), or there is none
        passing = index < self._num_passing
        if passing and name not in self._missing[index]:
            self._end_backward()  # a second gradient: another backward pass has begun
        if self.finished or index < self._started:
            raise RuntimeError(
                f"a gradient of {name} arrived after its bucket was reduced: call zero() "
                f"before a new step, and all but the last backward inside no_sync()"
            )
        if param.grad_added_to_main:  # type: ignore[attr-defined]
            param.grad_added_to_main = False  # type: ignore[attr-defined]
        else:
            assert param.grad is not None
            buffer, blank = take_main_grad(param)
            (buffer.copy_ if blank else buffer.add_)(param.grad)
        param.grad = None
        if self._sync or passing:
            self._missing[index].discard(name)
            if self.mesh.config.overlap:
                self._start_complete()

    def _end_backward(self) -> None:
        """Reduce the gradients of which only shards are kept, and expect them again."""
        if self.finished or not self._num_passing:
            return
        self._start_up_to(self._num_passing)
        self._started = 0
        for bucket, missing in zip(self.buckets[: self._num_passing], self._missing, strict=False):
            missing.update(slot.name for slot in bucket.slots)

    def _start_complete(self) -> None:
        # Strictly in order: a rank on which some parameter got no gradient, or got it in another
        # order, still makes the same calls in the same order as the others.
        stop = self._started
        while (
            stop < len(self.buckets) and not self.buckets[stop].deferred and not self._missing[stop]
        ):
            stop += 1
        self._start_up_to(stop)

    def _start_up_to(self, stop: int) -> None:
        for bucket in self.buckets[self._started : stop]:
            self._under_way.append(Reduction(bucket))
            for earlier in self._under_way[:-1]:
                if earlier.has_two_parts:
                    earlier.go_on()
            self._under_way = [reduction for reduction in self._under_way if not reduction.is_done]
        self._started = max(self._started, stop)

    def _finish_reductions(self) -> None:
        for reduction in self._under_way:
            reduction.finish()
        self._under_way.clear()
        self._started = 0


def check_specs(params: Mapping[str, nn.Parameter], specs: Mapping[str, ParamSpec]) -> None:
    """Check that every parameter has a spec of its shape; ValueError."""
    for name, param in params.items():
        if name not in specs:
            raise ValueError(f"parameter {name} has no spec")
        if specs[name].layout.shape != tuple(param.shape):
            raise ValueError(
                f"parameter {name} has shape {list(param.shape)}, its spec "
                f"{list(specs[name].layout.shape)}"
            )


def sum_ranges(ranges: Iterable[tuple[Group, ParamSpec, GradSync, Tensor]]) -> None:
    """Replace each view by its sum over its group, with one collective for each group.

    Members of a group may hold different parameters besides those they share, in another order, so
    the shared ones are taken in the order of their global names.
    """
    by_group: dict[Group, list[tuple[tuple[str, int], Tensor]]] = defaultdict(list)
    for group, spec, sync, view in ranges:
        by_group[group].append(((min(spec.layout.names(), default=""), sync.start), view))
    for group, entries in by_group.items():
        views = [view for _, view in sorted(entries, key=lambda entry: entry[0])]
        total = torch.cat(views)
        all_reduce_(total, group).wait()
        for view, part in zip(
            views, torch.split(total, [view.numel() for view in views]), strict=True
        ):
            view.copy_(part)
