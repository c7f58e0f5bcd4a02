"""The `mcore-ckpt` command."""

from __future__ import annotations

import argparse
import json
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status.

    0: done. 1: `verify` found damage. 2: a mistake of the user, told in one line.
    """
    arguments = _parser().parse_args(argv)
    from mcore_ckpt.errors import CheckpointError

    try:
        status: int = arguments.run(arguments)
    except (ValueError, OSError, CheckpointError) as error:
        print(f"mcore-ckpt: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-ckpt", description="Look into checkpoints, and check them."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    where = "a checkpoint, or the directory of several: then the newest one"

    inspect = commands.add_parser("inspect", help="show what a checkpoint holds")
    inspect.add_argument("directory", metavar="DIR", help=where)
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="compare every byte with the checksums")
    verify.add_argument("directory", metavar="DIR", help=where)
    verify.set_defaults(run=_verify)
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    from mcore_ckpt.inspecting import render, summarise

    summary = summarise(arguments.directory)
    print(json.dumps(summary, indent=1) if arguments.json else render(summary))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from mcore_ckpt.inspecting import count
    from mcore_ckpt.verifying import verify

    found = verify(arguments.directory)
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
