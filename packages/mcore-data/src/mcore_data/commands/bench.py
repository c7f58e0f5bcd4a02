"""`bench`: how fast and in how much memory an index is built, beside Megatron-LM where it is."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mcore_data.commands import Commands

# Each runs in processes of its own: peak memory is then its own, and nothing is warm. They print
# one line of JSON.
_COMMON: Final = """
import hashlib, json, resource, sys, time
import numpy as np

prefix, seq_length, seed, repeats = sys.argv[1], *map(int, sys.argv[2:5])

def peak():
    try:  # of this process alone: the other figure begins with what its parent had
        with open("/proc/self/status") as file:
            return int(file.read().split("VmHWM:")[1].split()[0])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def measure(build):
    seconds, before = [], peak()
    for _ in range(repeats):
        begin = time.process_time()  # other work on the machine disturbs it least
        parts = build()
        seconds.append(time.process_time() - begin)
    grown = peak() - before
    digest = hashlib.blake2b()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    row = {"seconds": min(seconds), "peak_mb": grown / 1000, "digest": digest.hexdigest()}
    print(json.dumps(row))
"""
_OURS: Final = (
    _COMMON
    + """
from mcore_data.datasets import build_gpt_index, compiled
from mcore_data.indexed import IndexedReader

if sys.argv[5] == "numpy":
    compiled.available = lambda: False
else:
    compiled.WORTH_COMPILING = 0  # whatever the size
    small = np.full(8, 8, np.int32)
    build_gpt_index(small, np.arange(8), seq_length=8, num_samples=None, seed=0)
reader = IndexedReader(prefix)
documents = np.arange(len(reader), dtype=np.int32)
int(reader.lengths.sum(dtype=np.int64))

def build():
    index = build_gpt_index(
        reader.lengths, documents, seq_length=seq_length, num_samples=None, seed=seed
    )
    return index.documents, index.samples, index.shuffle

measure(build)
"""
)
_THEIRS: Final = (
    _COMMON
    + """
import warnings
warnings.filterwarnings("ignore")
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

class Tokenizer:
    vocab_size, eod, pad = 1000, 0, -1
    unique_identifiers = {"class": "Tokenizer"}

reader = IndexedDataset(prefix, mmap=True)
documents = np.arange(len(reader), dtype=np.int32)
int(reader.sequence_lengths.sum(dtype=np.int64))
config = GPTDatasetConfig(
    random_seed=seed, sequence_length=seq_length, split="1,0,0", blend=([prefix], None),
    tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
    eod_mask_loss=False, create_attention_mask=False,
)
config.mock = True  # keeps no files

def build():
    made = GPTDataset(reader, prefix, documents, None, Split.train, config)
    return made.document_index, made.sample_index, made.shuffle_index

measure(build)
"""
)


def add(commands: Commands) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "bench", help="CPU time of building an index, beside megatron-core where it is installed"
    )
    sub.add_argument("--documents", type=int, default=10_000_000, help="default: 10000000")
    sub.add_argument("--tokens", type=float, default=1e10, help="in all (default: 1e10)")
    sub.add_argument("--seq-length", type=int, default=4096, help="default: 4096")
    sub.add_argument("--repeats", type=int, default=3, help="the best counts (default: 3)")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(run=_bench)


def _synthetic(folder: Path, num_documents: int, num_tokens: float) -> Path:
    """Write an index of random lengths and a `.bin` that is a hole; return the prefix."""
    import numpy as np

    from mcore_data.indexed import build_index

    mean = num_tokens / num_documents
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, max(2, round(2 * mean)), num_documents).astype(np.int32)
    prefix = folder / "lengths"
    (folder / "lengths.idx").write_bytes(
        build_index(lengths, np.arange(num_documents + 1), "uint16")
    )
    with open(folder / "lengths.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))
    return prefix


def _bench(args: argparse.Namespace) -> int:
    from mcore_data.datasets import compiled

    if min(args.documents, args.tokens, args.seq_length, args.repeats) < 1:
        raise ValueError("--documents, --tokens, --seq-length and --repeats must be at least 1")
    scripts = {"numpy": _OURS}
    if compiled.available():
        scripts["numba"] = _OURS
    scripts["megatron-core"] = _THEIRS
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = _synthetic(Path(folder), args.documents, args.tokens)
        options = [str(prefix), str(args.seq_length), "1234", str(args.repeats)]
        for name, script in scripts.items():
            run = [sys.executable, "-c", script, *options, name]
            result = subprocess.run(run, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                rows[name] = json.loads(result.stdout.splitlines()[-1])
            elif "No module named 'megatron'" not in result.stderr:
                reason = result.stderr.strip().splitlines() or ["no message"]
                raise ValueError(f"{name}: {reason[-1]}")
    theirs = rows.get("megatron-core")
    if theirs is not None:
        for row in rows.values():
            row["time_ratio"] = row["seconds"] / theirs["seconds"]
            row["memory_ratio"] = row["peak_mb"] / max(theirs["peak_mb"], 1e-3)
            row["identical"] = row["digest"] == theirs["digest"]
    if args.json:
        print(json.dumps(rows))
        return 0
    print(f"index of {args.documents:,} documents, {args.tokens:,.0f} tokens, one epoch, CPU time:")
    for name, row in rows.items():
        line = f"{name:14}{row['seconds']:8.2f} s{row['peak_mb']:10,.0f} MB"
        if theirs is not None:
            same = "identical" if row["identical"] else "DIFFERENT"
            line += f"   {row['time_ratio']:.2f} x time, {row['memory_ratio']:.2f} x memory, {same}"
        print(line)
    for name in ("numba", "megatron-core"):
        if name not in rows:
            print(f"{name:14}not installed")
    return 0
