"""`mcore-ckpt reshard`: write a checkpoint again, in other chunks, parts or names."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's subparsers."""
    parser = commands.add_parser(
        "reshard",
        help="write a checkpoint again, in other chunks, in part, or under other names",
        description="A checkpoint loads under any parallel layout as it is. This changes what is "
        "on disk: the size of the files, which tensors there are, their names and dtypes.",
    )
    parser.add_argument(
        "source", metavar="DIR", help="a checkpoint, or the directory of several: then the newest"
    )
    parser.add_argument("target", metavar="NEW", help="what to write: empty, or not there yet")
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="only tensors of such names, as 'model/*'; may be given more than once",
    )
    parser.add_argument(
        "--rename",
        action="append",
        nargs=2,
        default=[],
        metavar=("REGEX", "NAME"),
        help="another name for what the expression matches as a whole, with {1} for its first "
        "group; may be given more than once, the first that matches counts",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of floating-point tensors (default: as they are, bit for bit)",
    )
    parser.add_argument(
        "--chunk-size",
        default="8MiB",
        metavar="SIZE",
        help="upper bound on the size of a chunk, which is what is read (default: %(default)s)",
    )
    parser.add_argument(
        "--file-size",
        metavar="SIZE",
        help="upper bound on the size of a file of many chunks (default: one chunk in each)",
    )
    parser.add_argument(
        "--compression",
        metavar="CODEC",
        help="of chunks: zstd, zstd:LEVEL, blosc or blosc:NAME:LEVEL (default: none)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it and return the exit status."""
    from mcore_ckpt.commands.sizes import parse_size

    chunk_bytes = parse_size(arguments.chunk_size, "--chunk-size")
    file_size = arguments.file_size
    file_bytes = None if file_size is None else parse_size(file_size, "--file-size")
    import torch

    from mcore_ckpt.checkpoint import Checkpoint
    from mcore_ckpt.inspecting import count
    from mcore_ckpt.progress import ProgressLine
    from mcore_ckpt.rewriting import rewrite
    from mcore_ckpt.selection import Selection

    infos = Checkpoint(arguments.source).manifest.tensors
    selection = Selection(patterns=arguments.only)
    total = sum(info.num_bytes for name, info in infos.items() if name in selection)
    with ProgressLine("writing", total) as line:
        path = rewrite(
            arguments.source,
            arguments.target,
            patterns=arguments.only,
            rename=[(pattern, name) for pattern, name in arguments.rename],
            dtype=None if arguments.dtype is None else getattr(torch, arguments.dtype),
            chunk_bytes=chunk_bytes,
            compression=arguments.compression,
            file_bytes=file_bytes,
            advance=line,
        )
    written = Checkpoint(path).manifest.tensors.values()
    size = sum(info.num_bytes for info in written)
    print(f"{path}: {count(len(written), 'tensor')}, {count(size, 'byte')}")
    return 0
