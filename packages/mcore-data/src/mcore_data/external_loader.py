"""Steps that come from elsewhere: a user's own reader, resumed by the samples consumed."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Final, Self

from mcore_data.loader import MicroBatch

_FIELDS: Final = ("tokens", "labels", "loss_mask", "positions", "cu_seqlens", "sample_ids")


class ExternalLoader:
    """Training steps from a function of the user's, which begins at any number of samples.

    Args:
        steps: called with the samples consumed; returns an iterator over the steps from there,
            each a list of micro-batches as `collate` or `collate_flat` make them.
        samples_per_step: samples of a step, over all ranks.
        name: what the state calls the stream; a state of another name is refused.
        consumed: samples consumed before, over all ranks.

    Raises:
        ValueError: from `next`, when a micro-batch lacks an array or has one too many rows.
        StopIteration: from `next`, when `steps` ends.

    """

    def __init__(
        self,
        steps: Callable[[int], Iterator[list[MicroBatch]]],
        *,
        samples_per_step: int,
        name: str = "external",
        consumed: int = 0,
    ) -> None:
        if samples_per_step < 1:
            raise ValueError(f"samples_per_step is {samples_per_step}, the least is 1")
        self.consumed = consumed
        self.samples_per_step = samples_per_step
        self.name = name
        self._function = steps
        self._steps: Iterator[list[MicroBatch]] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[MicroBatch]:
        if self._steps is None:
            self._steps = iter(self._function(self.consumed))
        step = next(self._steps)
        for number, batch in enumerate(step):
            self._check(number, batch)
        self.consumed += self.samples_per_step
        return step

    def _check(self, number: int, batch: MicroBatch) -> None:
        where = f"step after {self.consumed} samples, micro-batch {number} of {self.name}"
        if missing := [field for field in _FIELDS if field not in batch]:
            raise ValueError(f"{where}: it has no {', '.join(missing)}")
        shape = batch["tokens"].shape
        for field in ("labels", "loss_mask", "positions"):
            if batch[field].shape != shape:
                raise ValueError(
                    f"{where}: {field} has shape {batch[field].shape}, tokens have {shape}"
                )
        if int(batch["cu_seqlens"][-1]) != batch["tokens"].size:
            raise ValueError(
                f"{where}: cu_seqlens ends at {batch['cu_seqlens'][-1]}, there are "
                f"{batch['tokens'].size} tokens"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, JSON-able."""
        return {"consumed_samples": self.consumed, "sampler": {"external": self.name}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; ValueError when the stream is another one."""
        if state["sampler"] != {"external": self.name}:
            raise ValueError(
                f"the state is of a stream with {state['sampler']}, this loader is {self.name!r}"
            )
        self.close()
        self.consumed = int(state["consumed_samples"])

    def close(self) -> None:
        """Let go of the iterator; the next step starts again from `consumed`."""
        steps, self._steps = self._steps, None
        if isinstance(steps, Generator):
            with closing(steps):
                pass
