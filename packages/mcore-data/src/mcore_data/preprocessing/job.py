"""A run of preprocessing: tasks in, files out."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mcore_data.indexed import IndexedWriter
from mcore_data.preprocessing.encode import Encoded, TaskEncoder
from mcore_data.preprocessing.pool import ordered_map
from mcore_data.preprocessing.report import PreprocessReport
from mcore_data.preprocessing.sources import Task


@dataclass(frozen=True, kw_only=True)
class Job:
    """How to tokenise, and where to: `outputs` are prefixes by key.

    ValueError when `workers` or `partition` make no sense.
    """

    encoder: TaskEncoder
    outputs: Mapping[str, Path]
    dtype: np.dtype[Any]
    workers: int = 1
    strict: bool = False
    partition: tuple[int, int] = (0, 1)
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"{self.workers} workers, the least is 1")
        part, num_parts = self.partition
        if not 0 <= part < num_parts:
            raise ValueError(
                f"partition {part} of {num_parts}: it must lie in 0 to {num_parts - 1}"
            )

    def run(
        self, tasks: Iterator[Task], *, files: Sequence[Path] | None = None, base: Path
    ) -> PreprocessReport:
        """Write this partition's share of `tasks` to the outputs.

        `files`: what the tasks were read from, in a run that can go on after a kill; it keeps what
        is done beside `base`. ValueError when there is no document.
        """
        begin = time.perf_counter()
        share = islice(tasks, self.partition[0], None, self.partition[1])
        if files is None:
            report = self._run_at_once(share)
        else:
            from mcore_data.preprocessing.resume import run_in_parts

            report = run_in_parts(self, share, files, base)
        return replace(report, seconds=time.perf_counter() - begin)

    def results(
        self, tasks: Iterable[Task], report: PreprocessReport
    ) -> Iterator[tuple[Encoded, PreprocessReport]]:
        """Yield what each task gives, in order, and the counts so far, `report` included.

        ValueError at a bad line, if `strict`.
        """
        begin, before = time.perf_counter(), report.tokens
        disable = None if self.progress is None else not self.progress
        with tqdm(
            unit=" documents", unit_scale=True, disable=disable, initial=report.documents
        ) as bar:
            for part in ordered_map(self.encoder, tasks, workers=self.workers):
                if self.strict and part.bad:
                    raise ValueError(part.bad[0])
                written = report.documents
                report = report.plus(part)
                rate = (report.tokens - before) / (time.perf_counter() - begin)
                text = f"{report.tokens:,} tokens, {rate:,.0f} tokens/s"
                bar.set_postfix_str(text, refresh=False)
                bar.update(report.documents - written)
                yield part, report

    def open_writers(self, stack: ExitStack, paths: Mapping[str, Path]) -> dict[str, IndexedWriter]:
        """Open a writer for every key."""
        multimodal = self.encoder.multimodal
        return {
            key: stack.enter_context(IndexedWriter(path, self.dtype, multimodal=multimodal))
            for key, path in paths.items()
        }

    def _run_at_once(self, tasks: Iterable[Task]) -> PreprocessReport:
        report = PreprocessReport(outputs=tuple(self.outputs.values()))
        with ExitStack() as stack:
            writers = self.open_writers(stack, self.outputs)
            for part, counted in self.results(tasks, report):
                write(writers, part)
                report = counted
            report.check_written()
        return report


def write(writers: Mapping[str, IndexedWriter], part: Encoded) -> None:
    """Append what a task gave to the file of each key."""
    for key, writer in writers.items():
        found = part.documents[key]
        writer.add_documents(found.tokens, found.lengths, found.sequences, found.modes)
