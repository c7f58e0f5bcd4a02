"""Work on indexed files: `inspect`, `verify`, `merge`, `split`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_data.commands import Commands


def add(commands: Commands) -> None:
    """Add the subcommands."""
    sub = commands.add_parser("inspect", help="check .bin/.idx files and print their numbers")
    sub.add_argument(
        "prefix", metavar="PREFIX", help="path or address (s3://…) without .bin and .idx"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--document", type=int, metavar="I", help="also print document I")
    sub.add_argument("--tokenizer", metavar="NAME", help="print the document as text")
    sub.set_defaults(run=_inspect)

    sub = commands.add_parser(
        "verify", help="check .bin/.idx files or tar files of images; the first fault is named"
    )
    sub.add_argument(
        "prefixes",
        nargs="+",
        metavar="PREFIX",
        help="paths without .bin and .idx, or .tar files with pairs of image and text",
    )
    sub.add_argument("--vocab-size", type=int, metavar="N", help="also read every token")
    sub.set_defaults(run=_verify)

    sub = commands.add_parser("merge", help="join .bin/.idx files")
    sub.add_argument("prefixes", nargs="+", metavar="PREFIX", help="paths without .bin and .idx")
    sub.add_argument("--output", required=True, metavar="PREFIX", help="write the files here")
    sub.set_defaults(run=_merge)

    sub = commands.add_parser("split", help="cut .bin/.idx files by document")
    sub.add_argument("prefix", metavar="PREFIX", help="path without .bin and .idx")
    sub.add_argument(
        "--weights", required=True, metavar="W,W,...", help="shares of the parts, such as 9,1"
    )
    sub.add_argument(
        "--output", required=True, metavar="PREFIX", help="write PREFIX_0, PREFIX_1, ..."
    )
    sub.set_defaults(run=_split)


def _inspect(args: argparse.Namespace) -> int:
    from mcore_data.indexed import IndexedReader
    from mcore_data.inspection import summarise
    from mcore_data.tokenizers import load_tokenizer

    if args.tokenizer is not None and args.document is None:
        raise ValueError("--tokenizer needs --document I, the document to print")
    summary = summarise(args.prefix).as_dict()
    document = None
    if args.document is not None:
        with IndexedReader(args.prefix) as reader:
            document = reader.document(args.document).tolist()
        summary["document"] = document
    if args.tokenizer is not None and document is not None:
        summary["text"] = load_tokenizer(args.tokenizer).decode(document)
    if args.json:
        print(json.dumps(summary))
        return 0
    for name, value in summary.items():
        if name not in ("document", "text"):
            print(f"{name:11}{value:,}" if type(value) is int else f"{name:11}{value}")
    if document is not None:
        shown = summary.get("text", " ".join(map(str, document)))
        print(f"\ndocument {args.document}, {len(document):,} tokens:\n{shown}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from mcore_data.indexed import IndexedReader

    for prefix in args.prefixes:
        if Path(prefix).suffix == ".tar":
            _verify_images(prefix)
            continue
        with IndexedReader(prefix) as reader:
            reader.verify(args.vocab_size)
            print(f"{prefix}: {reader.num_documents:,} documents, {reader.num_tokens:,} tokens, ok")
    return 0


def _verify_images(path: str) -> None:
    from mcore_data.images import ImageTransform, TarImages

    pairs = TarImages(path)
    transform = ImageTransform(size=(1, 1), fit="stretch")
    for i in range(len(pairs)):
        transform(pairs[i].image, where=pairs[i].where)
    print(f"{path}: {len(pairs):,} pairs of image and text, {pairs.left_out:,} left out, ok")


def _merge(args: argparse.Namespace) -> int:
    from mcore_data.indexed import IndexedReader, merge

    merge(args.prefixes, args.output)
    with IndexedReader(args.output) as reader:
        print(f"{args.output}: {reader.num_documents:,} documents, {reader.num_tokens:,} tokens")
    return 0


def _split(args: argparse.Namespace) -> int:
    from itertools import accumulate, pairwise

    from mcore_data.datasets.blend_order import check_weights
    from mcore_data.indexed import IndexedReader, split

    try:
        weights = [float(word) for word in args.weights.split(",")]
    except ValueError:
        raise ValueError(f"--weights is {args.weights!r}, it must be numbers such as 9,1") from None
    with IndexedReader(args.prefix) as reader:
        count = reader.num_documents
    shares = check_weights(weights).tolist()
    cuts = [round(share * count) for share in accumulate(shares, initial=0.0)]
    parts: dict[str | Path, range] = {
        f"{args.output}_{k}": range(a, b) for k, (a, b) in enumerate(pairwise(cuts))
    }
    for name, documents in parts.items():
        if not documents:
            raise ValueError(
                f"{name} would get none of the {count} documents of {args.prefix} with weights "
                f"{args.weights}"
            )
    split(args.prefix, parts)
    for name, documents in parts.items():
        print(f"{name}: {len(documents):,} documents")
    return 0
