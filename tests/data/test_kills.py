"""Processes killed at any moment: nothing half-written is accepted, and a rerun completes."""

import os
import subprocess
import sys

import pytest

KILLS = 20 if os.environ.get("NIGHTLY") else 4

# Forks a child for every kill, so that the libraries are imported once. The child is ended by an
# alarm without a handler: at once, as by SIGKILL.
_SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from mcore_data import ByteTokenizer, GPTDataset, IndexedReader, IndexedWriter, preprocess
from mcore_data.indexed import merge
from mcore_data.preprocessing import resume, sources

job, kills, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
resume.PART_TASKS, sources._TASK_BYTES = 3, 20_000
texts = folder / "texts"
texts.mkdir()
rng = random.Random(0)
for k in range(8):
    with open(texts / f"{k}.jsonl", "w") as file:
        for i in range(200):
            file.write('{"text": "%s"}\\n' % ("word " * rng.randrange(1, 60)))
pair = [folder / f"in{k}" for k in range(2)]
for prefix in pair:
    with IndexedWriter(prefix, "uint16") as writer:
        for i in range(400):
            writer.add_document(np.full(rng.randrange(1, 900), i))

def work(out):
    if job == "preprocess":
        preprocess([texts], tokenizer=ByteTokenizer(), output=out / "c", append_eod=True,
                   resume=True, progress=False)
    elif job == "merge":
        merge(pair, out / "c")
    else:
        GPTDataset(IndexedReader(pair[0]), seq_length=16, num_samples=90_000, seed=1,
                   cache_dir=out)

def read(out):
    if job == "index":
        dataset = GPTDataset(IndexedReader(pair[0]), seq_length=16, num_samples=90_000, seed=1,
                             cache_dir=out)
        parts = (dataset.index.documents, dataset.index.samples, dataset.index.shuffle)
        return b"".join(np.asarray(part).tobytes() for part in parts)
    with IndexedReader(out / "c") as reader:
        reader.verify()
    return (out / "c.bin").read_bytes() + (out / "c.idx").read_bytes()

whole = folder / "whole"
whole.mkdir()
work(whole)
expected = read(whole)
again = folder / "again"
again.mkdir()
begin = time.perf_counter()
work(again)
length = time.perf_counter() - begin
ended = 0
for kill in range(kills):
    out = folder / f"out{kill}"
    out.mkdir()
    for attempt in range(2):
        child = os.fork()
        if child == 0:
            signal.setitimer(signal.ITIMER_REAL, length * (kill + 0.5 + attempt / 3) / kills)
            work(out)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGALRM), code
        ended += code != 0
        if job != "index" and (out / "c.idx").exists():
            assert read(out) == expected, kill
    work(out)
    assert read(out) == expected, kill
    left = [p.name for p in out.iterdir() if p.name.startswith(".")]
    assert not left, left
print("killed", ended)
"""


@pytest.mark.slow
@pytest.mark.parametrize("job", ["preprocess", "merge", "index"])
def test_killed_at_any_moment(job, tmp_path):
    run = [sys.executable, "-c", _SCRIPT, job, str(KILLS), str(tmp_path)]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # The moments are spread over the length of a whole run: some are hit on any machine.
    assert int(result.stdout.split()[1]) >= 1
