"""`mcore-ckpt prune`: remove old checkpoints of a directory."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's subparsers."""
    parser = commands.add_parser(
        "prune",
        help="remove old checkpoints of a directory",
        description="The newest checkpoint is always kept, once it has been found to be whole; and "
        "what the options say. A run may be saving in the directory meanwhile.",
    )
    parser.add_argument("directory", metavar="DIR", help="the directory of the checkpoints")
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N")
    parser.add_argument("--keep-every", type=int, metavar="M", help="keep steps divisible by M")
    parser.add_argument(
        "--scan",
        choices=("none", "quick", "full"),
        default="quick",
        help="how to look at the newest one first: at files and sizes, or at all bytes "
        "(default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="remove nothing, only tell")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it and return the exit status."""
    from mcore_ckpt.inspecting import count
    from mcore_ckpt.pruning import prune

    done = prune(
        arguments.directory,
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        dry_run=arguments.dry_run,
        scan=arguments.scan,
    )
    if arguments.json:
        removed = [str(path) for path in done.removed]
        row = {"newest": str(done.newest), "removed": removed, "dry_run": arguments.dry_run}
        print(json.dumps(row, indent=1))
        return 0
    verb = "would remove" if arguments.dry_run else "removed"
    for path in done.removed:
        print(f"{verb} {path}")
    print(f"{done.newest}: kept as the newest; {verb} {count(len(done.removed), 'checkpoint')}")
    return 0
