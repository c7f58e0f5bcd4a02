"""The `mcore-ckpt` command."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

from mcore_ckpt.commands import average, bench, diff, prune, reshard, verify
from mcore_ckpt.commands.sizes import parse_size


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status.

    0: done. 1: `verify` found damage, or `diff` a difference. 2: a mistake of the user, told in one
    line. 128 and the signal's number: stopped by Ctrl-C (130) or SIGTERM (143).
    """
    arguments = _parser().parse_args(argv)
    from mcore_ckpt.advice import advice
    from mcore_ckpt.errors import CheckpointError
    from mcore_ckpt.stopping import Stopped, raising_on_sigterm

    try:
        with raising_on_sigterm():
            status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor will more be read
        return 0
    except KeyboardInterrupt as error:
        what, number = "interrupted", int(signal.SIGINT)
        if isinstance(error, Stopped):
            what, number = f"stopped by {error}", error.number
        print(f"mcore-ckpt: {what}; what was half-written is no checkpoint", file=sys.stderr)
        return 128 + number
    except (ValueError, OSError, CheckpointError) as error:
        hint = advice(error) if isinstance(error, OSError) else None
        text = f"{error}: {hint}" if hint and hint not in str(error) else str(error)
        print(f"mcore-ckpt: {' '.join(text.splitlines())}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-ckpt",
        description="Look into checkpoints, check them, convert them. They are in a directory, or "
        "at an address in object storage, such as s3://bucket/runs/demo.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    where = "a checkpoint, or the directory of several: then the newest one"

    inspect = commands.add_parser("inspect", help="show what a checkpoint holds")
    inspect.add_argument("directory", metavar="DIR", help=where)
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    verify.add(commands)
    diff.add(commands)
    average.add(commands)
    reshard.add(commands)
    prune.add(commands)
    bench.add(commands)

    convert = commands.add_parser(
        "convert",
        help="write the weights of a checkpoint as another kind",
        description="Kinds: hf, a Hugging Face folder; native, a checkpoint of ours (or the "
        "directory of several); dcp, a folder of torch.distributed.checkpoint; to read alone: "
        "megatron, any of Megatron-LM's formats, and auto, whichever of these is there.",
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
        help="of floating-point weights (default: as they are, bit for bit)",
    )
    convert.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="size at which hf and dcp begin another file (default: %(default)s)",
    )
    convert.set_defaults(run=_convert)
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    from mcore_ckpt.inspecting import render, summarise

    summary = summarise(arguments.directory)
    print(json.dumps(summary, indent=1) if arguments.json else render(summary))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    limit = parse_size(arguments.max_shard_size, "--max-shard-size")
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
