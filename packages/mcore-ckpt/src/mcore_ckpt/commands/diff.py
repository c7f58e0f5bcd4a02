"""`mcore-ckpt diff`: how two checkpoints differ, tensor by tensor."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's subparsers."""
    parser = commands.add_parser(
        "diff",
        help="show which tensors of two checkpoints differ, and by how much",
        description="Exit status 0: nothing differs (or by no more than the tolerance); 1: "
        "something does.",
    )
    for name in ("first", "second"):
        parser.add_argument(
            name, metavar="DIR", help="a checkpoint, or the directory of several: then the newest"
        )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="only tensors of such names, as 'model/*'; may be given more than once",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="ERROR",
        help="absolute errors up to this are none, and dtypes may differ (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it and return the exit status."""
    if not arguments.tolerance >= 0:
        raise ValueError(f"--tolerance is {arguments.tolerance}; nearest valid: 0")
    from mcore_ckpt.checkpoint import Checkpoint
    from mcore_ckpt.comparing import compare_checkpoints
    from mcore_ckpt.inspecting import count
    from mcore_ckpt.progress import ProgressLine
    from mcore_ckpt.selection import Selection

    infos = Checkpoint(arguments.first).manifest.tensors
    selection = Selection(patterns=arguments.only)
    total = sum(info.num_bytes for name, info in infos.items() if name in selection)
    with ProgressLine("comparing", total) as line:
        found = compare_checkpoints(
            arguments.first, arguments.second, patterns=arguments.only, advance=line
        )
    same = found.within(arguments.tolerance)
    if arguments.json:
        print(json.dumps({"same": same, **found.to_json()}, indent=1))
        return 0 if same else 1
    for side, names in ((found.first, found.only_first), (found.second, found.only_second)):
        for name in names:
            print(f"{name}: only in {side}")
    for text in found.shapes:
        print(f"{text}: other shapes")
    width = max((len(t.name) for t in found.tensors), default=0)
    for t in sorted(found.tensors, key=lambda t: -t.max_error):
        dtypes = "" if t.dtypes[0] == t.dtypes[1] else f"  {t.dtypes[0]} and {t.dtypes[1]}"
        print(
            f"{t.name:<{width}}  max error {t.max_error:.3g}  "
            f"{t.num_different} of {count(t.num_elements, 'element')}{dtypes}"
        )
    print(f"{count(found.num_compared, 'tensor')} compared: {'same' if same else 'different'}")
    return 0 if same else 1
