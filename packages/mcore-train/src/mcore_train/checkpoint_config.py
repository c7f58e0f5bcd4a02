"""What a run saves and starts from: the field `checkpoint` of its config."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from mcore_train.checks import require

_ADDRESS: Final = re.compile(r".*://|[a-z][a-z0-9+.-]+:/")  # a path has lost a stroke
OnSaveError = Literal["stop", "continue"]
Scan = Literal["none", "quick", "full"]
Strict = Literal["error", "warn", "report"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, what to keep, what to start from.

    Every `interval` steps, and at the end, the run is saved in `directory`, a path or an address in
    object storage (`s3://bucket/run`, see `mcore_ckpt.addresses`). `asynchronous` copies
    its state to host memory, goes on, and writes in the background; a save that falls due while
    one is under way waits for that. Of older steps the newest `keep_last` stay (the new one
    counted), and multiples of `keep_every`; they go when the new one is durable. When a save fails,
    a full disk say, the run ends with `on_error: stop`; with `continue` it goes on and tries again
    when the next one is due, but for the last, which must succeed.

    `resume` continues from the newest committed checkpoint of `directory` when there is one. `scan`
    is done first: `quick` looks for every file and its size, `full` reads all and compares
    checksums; what is damaged is passed over with a warning for the one before. (Whatever is loaded
    is compared with its checksums in any case.)

    Every `local_interval` steps the run is saved in `local`, too: a directory of each machine, on a
    fast disk or a RAM disk, with a copy on `local_copies` other machines. A run that goes on takes
    the newest of the two, whatever its layout; so steps since the last checkpoint in `directory`
    are not lost with a process, nor with a machine. Only the newest local one is kept.

    `load` starts from a checkpoint elsewhere (a step folder, or a folder of them; `load` may be an
    address, too) when `directory`
    has none; without `resume` the directory must hold none. Of a folder of them `load_step` says
    which, and the newest is the default. `reset_step` starts at step 0 with the loaded weights and
    moments, and takes the schedule and data of this config; `weights_only` takes the weights alone.
    With it `load` may also be a Hugging Face folder, whose architecture `model: {hf: FOLDER}` takes
    over, as `model: {checkpoint: FOLDER}` does for a checkpoint. `load_optimizer: false` goes on at
    the step and in the data of what is loaded with moments that start afresh, `load_rng: false`
    with the random streams of this config's seed.

    `strict` is about what does not fit: tensors that one side lacks, or has in another shape, and
    fields of the architecture. It is an `error`; or a warning, or one line of text (`report`), and
    what fits is loaded.

    `compression` of what is saved in `directory`: `zstd`, `zstd:LEVEL`, `blosc` or
    `blosc:NAME:LEVEL`. `file_bytes` bounds files that hold many chunks each.
    """

    directory: Path | str | None = None
    interval: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    asynchronous: bool = False
    on_error: OnSaveError = "stop"
    local: Path | None = None
    local_interval: int | None = None
    local_copies: int = 1
    resume: bool = True
    scan: Scan = "quick"
    load: Path | str | None = None
    reset_step: bool = False
    load_step: int | None = None
    weights_only: bool = False
    load_optimizer: bool = True
    load_rng: bool = True
    strict: Strict = "error"
    compression: str | None = None
    file_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("directory", "load"):
            object.__setattr__(self, name, _place(name, getattr(self, name)))
        require(
            _ADDRESS.match(str(self.local)) is None,
            f"local={self.local} is no path: local saves go to a directory of each machine",
        )
        for name in ("interval", "keep_last", "keep_every", "file_bytes"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value} must be at least 1, or null")
            require(
                value is None or self.directory is not None,
                f"{name}={value} needs checkpoint.directory",
            )
        require(
            not self.asynchronous or self.directory is not None,
            "asynchronous saving needs checkpoint.directory",
        )
        self._check_local()
        for name in ("reset_step", "load_step", "weights_only", "load_optimizer", "load_rng"):
            value = getattr(self, name)
            require(
                value == getattr(CheckpointConfig, name) or self.load is not None,
                f"{name} is about checkpoint.load, which is not set",
            )
        for name in ("load_optimizer", "load_rng"):
            require(
                getattr(self, name) or not self.weights_only,
                f"{name}=False does nothing: weights_only leaves that out, too",
            )
        require(
            self.compression is None or self.directory is not None,
            f"compression={self.compression} needs checkpoint.directory",
        )
        if self.compression is not None:
            from mcore_ckpt.codecs import Codec  # it loads torch

            Codec.parse(self.compression)

    def _check_local(self) -> None:
        interval, copies = self.local_interval, self.local_copies
        require(
            (self.local is None) == (interval is None),
            f"local={self.local} and local_interval={interval}: give both, or neither",
        )
        require(
            self.local is None or self.directory is not None,
            f"local={self.local} needs checkpoint.directory, too: machines come and go",
        )
        require(
            interval is None or interval >= 1,
            f"local_interval={interval} must be at least 1, or null",
        )
        require(copies >= 0, f"local_copies={copies} must be at least 0")


def _place(name: str, value: Path | str | None) -> Path | str | None:
    """Return a path, or an address that can be opened here."""
    if value is None or not _ADDRESS.match(str(value)):
        return None if value is None else Path(value)
    from mcore_ckpt.addresses import place, storage_at  # it loads torch

    try:
        storage_at(value)
        return place(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
