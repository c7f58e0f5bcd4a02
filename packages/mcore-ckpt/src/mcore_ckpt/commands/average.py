"""`mcore-ckpt average`: the mean of the weights of several checkpoints."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's subparsers."""
    parser = commands.add_parser(
        "average",
        help="write the mean of the weights of several checkpoints",
        description="Weights alone: what an optimizer keeps has no mean. Step, state and files are "
        "those of the last source.",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="DIR",
        help="checkpoints, or directories of several: then the newest of each",
    )
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="what to write: empty, or not there yet"
    )
    parser.add_argument(
        "--weights",
        metavar="W,W,…",
        help="a number for each source; divided by their sum (default: all the same)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it and return the exit status."""
    weights = None if arguments.weights is None else _numbers(arguments.weights)
    from mcore_ckpt.averaging import average
    from mcore_ckpt.checkpoint import Checkpoint
    from mcore_ckpt.progress import ProgressLine
    from mcore_ckpt.sources import MODEL

    total = sum(
        info.num_bytes
        for source in arguments.sources
        for name, info in Checkpoint(source).manifest.tensors.items()
        if name.startswith(MODEL)
    )
    with ProgressLine("averaging", total) as line:
        path = average(arguments.sources, arguments.to, weights=weights, advance=line)
    print(f"{path}: the mean of {len(arguments.sources)} checkpoints")
    return 0


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--weights {text!r}: give numbers, as 1,1,2") from None
