"""The sum of one bucket's gradients over the ranks, step by step."""

from __future__ import annotations

from torch import Tensor

from mcore_parallel.collectives import Work, all_reduce_, reduce_scatter_into
from mcore_parallel.data.buckets import Bucket


class Reduction:
    """One bucket under way: its shards to their owners, then summed over these shards' copies.

    Made when the bucket's gradients are complete, which starts the first sum. The second one starts
    in `go_on`, which waits for the first; every rank calls that at the same place among the
    reductions of other buckets. Gradients that are not kept are added to what this rank's share
    holds of earlier backward passes, and are not summed over copies here but once, by
    `sum_copies`.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._whole: Tensor | None = bucket.gradients.take()
        self._work: Work | None = None
        self._gone_on = False
        start, stop = bucket.owned
        self._mine = self._whole[start:stop]
        if bucket.shard.size > 1:
            self._work = reduce_scatter_into(self._mine, self._whole, bucket.shard)
        else:
            self.go_on()

    @property
    def has_two_parts(self) -> bool:
        """Whether `go_on` has more to do than to wait: a second sum, or a buffer to give back."""
        return not self.bucket.gradients.kept or self.bucket.copies.size > 1

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._gone_on and self._work is None

    def go_on(self) -> None:
        """Take the sum over `shard` and start that over `copies`; later calls do nothing."""
        if self._gone_on:
            return
        self._gone_on = True
        self._wait()
        if not self.bucket.gradients.kept:
            self.bucket.owned_grads.add_(self._mine)
            self._whole = None
            del self._mine
        else:
            self._work = all_reduce_(self.bucket.owned_grads, self.bucket.copies)

    def finish(self) -> None:
        """Return when the sum may be used."""
        self.go_on()
        self._wait()

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


def sum_copies(bucket: Bucket) -> Work | None:
    """Start the sum over copies of gradients that were accumulated shard by shard."""
    if bucket.gradients.kept:
        return None
    return all_reduce_(bucket.owned_grads, bucket.copies)
