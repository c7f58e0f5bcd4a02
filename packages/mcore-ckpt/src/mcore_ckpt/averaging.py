"""The mean of the weights of several checkpoints, as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from mcore_ckpt.addresses import Place, absolute
from mcore_ckpt.checkpoint import Checkpoint
from mcore_ckpt.convert import check_target
from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.memory import new_tensor
from mcore_ckpt.progress import Advance
from mcore_ckpt.sinks import CheckpointSink
from mcore_ckpt.sources import MODEL
from mcore_parallel.mapping import TensorMeta


def average(
    sources: Sequence[str | os.PathLike[str]],
    directory: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    advance: Advance | None = None,
) -> Place:
    """Write the mean of the weights (`model/…`) of checkpoints, and return the new one's path.

    Each source is a checkpoint, or the directory of several: then the newest. Means are taken in
    float64, rounded once to the dtype of the last source. Its step, state and files are kept, with
    the sources in `state["average"]`; moments of the optimizer are not. One tensor is in memory at
    a time.

    weights: of the sources; they are divided by their sum. Default: all count the same.
    advance: told of the bytes of all sources that have been read.

    Raises:
        FileNotFoundError: a source is no committed checkpoint.
        ValueError: fewer than two sources, weights that do not fit them, a directory that is not
            empty, or sources that do not hold the same tensors in the same shapes; or integers
            differ, which have no mean; names the tensor and the two checkpoints.
        CheckpointError: a source is damaged.
    """
    if len(sources) < 2:
        raise ValueError(f"an average needs at least 2 checkpoints, not {len(sources)}")
    shares = _shares(weights, len(sources))
    opened = [Checkpoint(source) for source in sources]
    last = opened[-1]
    names = [name for name in last if name.startswith(MODEL)]
    for other in opened[:-1]:
        _check_same(other, last, names)
    check_target("native", absolute(directory))
    state = last.state
    state["average"] = {"of": [str(c.path) for c in opened], "weights": shares}
    metas = {
        name: TensorMeta(last.info(name).shape, stored_type(last.info(name).dtype).torch)
        for name in names
    }
    files = {name: last.file(name) for name in last.manifest.files}
    sink = CheckpointSink(directory, metas, step=last.step, state=state, files=files, prefix="")
    with sink:
        for name in names:
            sink.write(name, _mean(opened, shares, name, advance))
    return sink.path


def _shares(weights: Sequence[float] | None, count: int) -> list[float]:
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count:
        raise ValueError(f"{len(given)} weights for {count} checkpoints; give one for each")
    total = sum(given)
    if not 0 < total < float("inf") or min(given) < 0:
        raise ValueError(
            f"weights {given} must not be negative, and not all be 0; their sum must be finite"
        )
    return [weight / total for weight in given]


def _check_same(other: Checkpoint, last: Checkpoint, names: Sequence[str]) -> None:
    theirs = [name for name in other if name.startswith(MODEL)]
    for name in sorted(set(names) ^ set(theirs)):
        lacks, has = (other, last) if name in names else (last, other)
        raise ValueError(f"{lacks.path} has no {name}, {has.path} has")
    for name in names:
        if other.info(name).shape != last.info(name).shape:
            raise ValueError(
                f"{name} is {list(other.info(name).shape)} in {other.path} and "
                f"{list(last.info(name).shape)} in {last.path}"
            )


def _mean(
    opened: Sequence[Checkpoint], shares: Sequence[float], name: str, advance: Advance | None
) -> torch.Tensor:
    info = opened[-1].info(name)
    dtype = stored_type(info.dtype).torch
    result = new_tensor(info.shape, dtype, f"{opened[-1].path}: tensor {name} {list(info.shape)}")
    inexact = dtype.is_floating_point or dtype.is_complex
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for number in range(info.grid.num_chunks):
        box = info.grid.box(number)
        parts = []
        for checkpoint in opened:
            parts.append(checkpoint.read(name, box))
            if advance:
                advance(parts[-1].numel() * parts[-1].element_size())
        if inexact:
            total = torch.zeros(box.shape, dtype=wide)
            for part, share in zip(parts, shares, strict=True):
                total += part.to(wide) * share
            result[box.slices] = total.to(dtype)
        else:
            for part, checkpoint in zip(parts, opened, strict=True):
                if not torch.equal(part, parts[-1]):
                    raise ValueError(
                        f"{name} is {info.dtype} and differs between {checkpoint.path} and "
                        f"{opened[-1].path}: it has no mean"
                    )
            result[box.slices] = parts[-1]
    return result
