"""`bench`: how fast an index is built and samples are read, beside Megatron-LM where it is."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mcore_data.commands import bench_scripts

if TYPE_CHECKING:
    from mcore_data.commands import Commands

_MEGATRON: Final = "megatron-core"
_LOADER_TOKENS: Final = 1 << 25  # most tokens of the file that the loader reads

Rows = dict[str, dict[str, Any]]


def add(commands: Commands) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "bench",
        help="CPU time of building an index and of reading samples, beside megatron-core where it "
        "is installed",
    )
    sub.add_argument("--documents", type=int, default=10_000_000, help="default: 10000000")
    sub.add_argument("--tokens", type=float, default=1e10, help="in all (default: 1e10)")
    sub.add_argument("--seq-length", type=int, default=4096, help="default: 4096")
    sub.add_argument(
        "--repeats", type=int, default=3, help="rounds, the best of each counts (default: 3)"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(run=_bench)


def _lengths(num_documents: int, num_tokens: float) -> Any:
    import numpy as np

    mean = num_tokens / num_documents
    rng = np.random.default_rng(0)
    return rng.integers(1, max(2, round(2 * mean)), num_documents).astype(np.int32)


def _hole(folder: Path, lengths: Any) -> Path:
    """Write an index of the lengths and a `.bin` that is a hole; return the prefix."""
    import numpy as np

    from mcore_data.indexed import build_index

    prefix = folder / "lengths"
    (folder / "lengths.idx").write_bytes(
        build_index(lengths, np.arange(len(lengths) + 1), "uint16")
    )
    with open(folder / "lengths.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))
    return prefix


def _text(folder: Path, lengths: Any) -> Path:
    """Write a file of random tokens with as many of the lengths as the loader reads."""
    import numpy as np

    from mcore_data.indexed import IndexedWriter

    few = lengths[: 1 + int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), _LOADER_TOKENS))]
    rng = np.random.default_rng(1)
    prefix = folder / "text"
    with IndexedWriter(prefix, "uint16") as writer:
        for length in few.tolist():
            writer.add_document(rng.integers(1, 1000, length, dtype=np.uint16))
    return prefix


def _measured(scripts: dict[str, str], options: list[str], repeats: int, best: str) -> Rows:
    """Run the scripts in turn, and keep of each the round with the least time or most speed."""
    rows: Rows = {}
    sign = 1 if best == "seconds" else -1
    for _ in range(repeats):
        for name, script in scripts.items():
            run = [sys.executable, "-c", script, *options, name]
            result = subprocess.run(run, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                row = json.loads(result.stdout.splitlines()[-1])
                if name not in rows or sign * row[best] < sign * rows[name][best]:
                    rows[name] = row
            elif "No module named 'megatron'" not in result.stderr:
                reason = result.stderr.strip().splitlines() or ["no message"]
                raise ValueError(f"{name}: {reason[-1]}")
    return rows


def _bench(args: argparse.Namespace) -> int:
    from mcore_data.datasets import compiled

    if min(args.documents, args.tokens, args.seq_length, args.repeats) < 1:
        raise ValueError("--documents, --tokens, --seq-length and --repeats must be at least 1")
    if not math.isfinite(args.tokens):
        raise ValueError(f"--tokens is {args.tokens}, it must be a finite number")
    names = ["numpy", "numba"] if compiled.available() else ["numpy"]
    builders = dict.fromkeys(names, bench_scripts.INDEX)
    builders[_MEGATRON] = bench_scripts.MEGATRON_INDEX
    loaders = {"mcore-data": bench_scripts.LOADER, _MEGATRON: bench_scripts.MEGATRON_LOADER}
    with tempfile.TemporaryDirectory() as folder:
        lengths = _lengths(args.documents, args.tokens)
        options = [str(_hole(Path(folder), lengths)), str(args.seq_length), "1234"]
        index = _measured(builders, options, args.repeats, "seconds")
        options[0] = str(_text(Path(folder), lengths))
        loader = _measured(loaders, options, args.repeats, "tokens_per_second")
    theirs = index.get(_MEGATRON)
    if theirs is not None:
        for row in index.values():
            row["time_ratio"] = row["seconds"] / theirs["seconds"]
            row["memory_ratio"] = row["peak_mb"] / max(theirs["peak_mb"], 1e-3)
            row["identical"] = row["digest"] == theirs["digest"]
        for row in loader.values():
            row["ratio"] = row["tokens_per_second"] / loader[_MEGATRON]["tokens_per_second"]
    if args.json:
        print(json.dumps({"index": index, "loader": loader}))
        return 0
    print(f"index of {args.documents:,} documents, {args.tokens:,.0f} tokens, one epoch, CPU time:")
    for name, row in index.items():
        line = f"{name:14}{row['seconds']:8.2f} s{row['peak_mb']:10,.0f} MB"
        if theirs is not None:
            same = "identical" if row["identical"] else "DIFFERENT"
            line += f"   {row['time_ratio']:.2f} x time, {row['memory_ratio']:.2f} x memory, {same}"
        print(line)
    print(f"micro-batches of 4 samples of {args.seq_length:,} tokens, tokens per second of CPU:")
    for name, row in loader.items():
        line = f"{name:14}{row['tokens_per_second']:14,.0f}"
        print(line + (f"   {row['ratio']:.2f} x" if "ratio" in row else ""))
    for name in ("numba", _MEGATRON):
        if name not in index:
            print(f"{name:14}not installed")
    return 0
