"""`mcore-ckpt verify`: compare every byte of a checkpoint with its checksums."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's subparsers."""
    parser = commands.add_parser(
        "verify",
        help="compare every byte with the checksums",
        description="Exit status 0: whole; 1: damaged.",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="a checkpoint, or the directory of several: then the newest one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it and return the exit status."""
    from mcore_ckpt.inspecting import count
    from mcore_ckpt.progress import ProgressLine
    from mcore_ckpt.verifying import num_bytes_of, verify

    with ProgressLine("verifying", num_bytes_of(arguments.directory)) as line:
        found = verify(arguments.directory, advance=line)
    if arguments.json:
        row = {
            "path": str(found.path),
            "whole": not found.problems,
            "tensors": found.num_tensors,
            "chunks": found.num_chunks,
            "bytes": found.num_bytes,
            "problems": [
                {"where": p.where, "what": p.what, "tensor": p.tensor, "chunk": p.chunk}
                for p in found.problems
            ],
        }
        print(json.dumps(row, indent=1))
        return 1 if found.problems else 0
    for problem in found.problems:
        print(problem)
    if found.problems:
        print(f"{found.path}: damaged ({count(len(found.problems), 'problem')})")
        return 1
    seen = (
        count(found.num_tensors, "tensor"),
        count(found.num_chunks, "chunk"),
        count(found.num_bytes, "byte"),
    )
    print(f"{found.path}: whole ({', '.join(seen)} checked)")
    return 0
