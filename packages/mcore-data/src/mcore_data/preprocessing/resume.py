"""Runs that go on after a kill: finished parts are kept beside the output, then joined.

The folder `.NAME.parts` holds for each part n the files `n-KEYNUMBER.bin/.idx` and, written last,
`n.json` with the tasks and counts so far. A part without its `n.json` is as good as absent.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final

from mcore_data._files import fsync_path
from mcore_data.indexed import merge
from mcore_data.preprocessing.encode import Encoded
from mcore_data.preprocessing.job import Job, write
from mcore_data.preprocessing.report import PreprocessReport
from mcore_data.preprocessing.sources import Task
from mcore_data.tokenizers import Tokenizer

PART_TASKS: Final = 256  # tasks of a part: about as many MiB of text


def run_in_parts(
    job: Job, tasks: Iterator[Task], files: Sequence[Path], base: Path
) -> PreprocessReport:
    """Write the outputs of `job`, going on where an earlier call with the same input stopped.

    ValueError when the folder belongs to another input, or a process is at work in it.
    """
    folder = base.with_name(f".{base.name}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    for path in base.parent.iterdir():  # what a kill left of an earlier run's removal
        if path.name.startswith(f"{folder.name}."):
            shutil.rmtree(path, ignore_errors=True)
    run = _fingerprint(job, files)
    with _claimed(folder):
        report = PreprocessReport(outputs=tuple(job.outputs.values()))
        number = done = 0
        while (state := _read(folder, number, run)) is not None:
            done = state["tasks"]
            counts = state["report"]
            report = PreprocessReport(
                **{**counts, "bad_lines": tuple(counts["bad_lines"]), "outputs": report.outputs}
            )
            number += 1
        results = job.results(islice(tasks, done, None), report)
        while (first := next(results, None)) is not None:
            count, report = _write_part(job, folder, number, first, results)
            done += count
            state = {"run": run, "tasks": done, "report": {**asdict(report), "outputs": []}}
            _commit(folder / f"{number:06d}.json", state)
            number += 1
        report.check_written()
        for place, output in enumerate(job.outputs.values()):
            merge([_prefix(folder, part, place) for part in range(number)], output)
        # Under another name first: a folder half removed is not taken for half done.
        rubbish = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
        folder.rename(rubbish)
        shutil.rmtree(rubbish, ignore_errors=True)
    return report


def _write_part(
    job: Job,
    folder: Path,
    number: int,
    first: tuple[Encoded, PreprocessReport],
    results: Iterator[tuple[Encoded, PreprocessReport]],
) -> tuple[int, PreprocessReport]:
    """Write one part; return the tasks in it and the counts after it."""
    paths = {key: _prefix(folder, number, place) for place, key in enumerate(job.outputs)}
    count, report = 1, first[1]
    with ExitStack() as stack:
        writers = job.open_writers(stack, paths)
        write(writers, first[0])
        for part, counted in islice(results, PART_TASKS - 1):
            write(writers, part)
            count, report = count + 1, counted
    return count, report


def _prefix(folder: Path, number: int, place: int) -> Path:
    return folder / f"{number:06d}-{place}"


def _read(folder: Path, number: int, run: str) -> dict[str, Any] | None:
    """Return what a part's last file says; None where there is none."""
    path = folder / f"{number:06d}.json"
    try:
        state: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); remove {folder} to start anew") from None
    if not isinstance(state, dict) or state.get("run") != run:
        raise ValueError(
            f"{folder} is left from a run with other inputs, tokenizer or options; remove it to "
            "start anew"
        )
    return state


def _commit(path: Path, state: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")  # the folder is claimed: nobody else writes this name
    with open(temporary, "w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_path(path.parent)


def _fingerprint(job: Job, files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        stat = path.stat()
        digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    options = [list(job.outputs), job.encoder.options(), job.partition]
    digest.update(json.dumps(options).encode())
    _hash_tokenizer(job.encoder.tokenizer, digest)
    return digest.hexdigest()


def _hash_tokenizer(tokenizer: Tokenizer, digest: "hashlib.blake2b") -> None:
    """Hash the files that the tokenizer saves: they are all that decides its ids."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode())
                digest.update(path.read_bytes())


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    # A file, since writers lock the folder itself while they publish.
    lock = folder / "lock"
    fd = os.open(lock, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is at work in {folder}") from None
        if not lock.exists() or os.stat(lock).st_ino != os.fstat(fd).st_ino:
            raise ValueError(f"another process has just finished in {folder}: run it again")
        yield
    finally:
        os.close(fd)
