"""Tasks in, files out: what a run of preprocessing does with its tasks."""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mcore_data.indexed import IndexedWriter
from mcore_data.preprocessing.encode import Encoded, Encoder
from mcore_data.preprocessing.pool import ordered_map
from mcore_data.preprocessing.report import PreprocessReport
from mcore_data.preprocessing.sources import Task


@dataclass(frozen=True, kw_only=True)
class Job:
    """How to tokenise, and where to: `outputs` are prefixes by key."""

    encoder: Encoder
    outputs: dict[str, Path]
    dtype: np.dtype[Any]
    workers: int
    strict: bool
    progress: bool | None

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

    def open_writers(self, stack: ExitStack, paths: dict[str, Path]) -> dict[str, IndexedWriter]:
        """Open a writer for every key."""
        return {k: stack.enter_context(IndexedWriter(p, self.dtype)) for k, p in paths.items()}

    def run(self, tasks: Iterable[Task]) -> PreprocessReport:
        """Write the outputs; ValueError when there is no document."""
        report = PreprocessReport(outputs=tuple(self.outputs.values()))
        with ExitStack() as stack:
            writers = self.open_writers(stack, self.outputs)
            for part, counted in self.results(tasks, report):
                write(writers, part)
                report = counted
            report.check_written()
        return report


def write(writers: dict[str, IndexedWriter], part: Encoded) -> None:
    """Append what a task gave to the file of each key."""
    for key, writer in writers.items():
        writer.add_documents(part.tokens[key], part.lengths[key])
