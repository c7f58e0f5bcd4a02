"""The `mcore-ckpt` command."""

from __future__ import annotations

import argparse
import json
import re
import sys

from mcore_ckpt.commands import prune


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
        prog="mcore-ckpt", description="Look into checkpoints, check them, convert them."
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

    prune.add(commands)

    convert = commands.add_parser(
        "convert",
        help="write the weights of a checkpoint as another kind",
        description="Kinds: hf, a Hugging Face folder; native, a checkpoint of ours (or the "
        "directory of several).",
    )
    for name, dest, help_text in (
        ("--from", "source", "what to read"),
        ("--to", "target", "what to write: empty, or not there yet"),
    ):
        convert.add_argument(
            name, dest=dest, nargs=2, required=True, metavar=("KIND", "PATH"), help=help_text
        )
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of floating-point tensors (default: as they are, bit for bit)",
    )
    convert.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="size at which hf begins another file (default: %(default)s)",
    )
    convert.set_defaults(run=_convert)
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


def _convert(arguments: argparse.Namespace) -> int:
    limit = _size(arguments.max_shard_size)
    import torch

    from mcore_ckpt.convert import convert
    from mcore_ckpt.inspecting import count

    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    done = convert(
        tuple(arguments.source), tuple(arguments.target), dtype=dtype, max_shard_bytes=limit
    )
    for note in done.notes:
        print(f"mcore-ckpt: {note}", file=sys.stderr)
    print(f"{done.path}: {count(done.num_tensors, 'tensor')}, {count(done.num_bytes, 'byte')}")
    return 0


def _size(text: str) -> int:
    """Return the bytes of `5GB`, `200MB`, `4GiB` or a bare number."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"--max-shard-size {text!r} is no size: write it as 5GB, 200MB or 4GiB")
    number, unit, binary = match.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    scale: int = (1024 if binary else 1000) ** power
    return int(number) * scale
