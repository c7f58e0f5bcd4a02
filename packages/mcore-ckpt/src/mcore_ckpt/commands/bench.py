"""`mcore-ckpt bench`: how fast checkpoints are on this disk."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's subparsers."""
    parser = commands.add_parser(
        "bench",
        help="measure saving and loading on a disk, beside torch's DCP and plain files",
        description="Everything is measured in one run, in turns; ratios are medians over the "
        "turns, each with the smallest and the largest. Loads read from the disk where its cache "
        "can be dropped.",
    )
    parser.add_argument(
        "--directory", metavar="DIR", help="on the disk to measure (default: temporary)"
    )
    parser.add_argument(
        "--size", default="2GiB", metavar="SIZE", help="of the state (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--small", type=int, default=5000, metavar="N", help="small tensors (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it and return the exit status."""
    from mcore_ckpt.commands.sizes import parse_size

    num_bytes = parse_size(arguments.size, "--size")
    from mcore_ckpt import checksum
    from mcore_ckpt.addresses import local_path
    from mcore_ckpt.bench import run_bench

    if checksum.LIBRARY == "zlib":
        print(
            "mcore-ckpt bench: checksums are zlib's, several times as slow as zlib-ng's: saves and "
            "loads take longer than they have to; pip install 'mcore-ckpt[fast]' brings zlib-ng",
            file=sys.stderr,
        )
    report = run_bench(
        None if arguments.directory is None else local_path(arguments.directory),
        num_bytes=num_bytes,
        num_ranks=arguments.ranks,
        num_small=arguments.small,
        repeats=arguments.repeats,
    )
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print("\n".join(report.lines()))
    return 0
