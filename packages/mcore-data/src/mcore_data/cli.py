"""The `mcore-data` command."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence


def _workers() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-data", description="Prepare and inspect training corpora."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inputs = "files, folders or glob patterns: JSONL (.jsonl, .ndjson, .json) or text, also .gz"

    sub = commands.add_parser("preprocess", help="tokenise text into .bin/.idx files")
    sub.add_argument("inputs", nargs="+", metavar="INPUT", help=inputs)
    sub.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR|byte",
        help="tokenizer directory, SentencePiece .model file, or byte",
    )
    sub.add_argument(
        "--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    sub.add_argument(
        "--key",
        action="append",
        metavar="KEY",
        help="key of the text in JSON lines (default: text); each of several goes to PREFIX_KEY",
    )
    sub.add_argument("--append-eod", action="store_true", help="end each document with EOD")
    sub.add_argument(
        "--workers", type=int, default=_workers(), help="processes (default: usable cores)"
    )
    sub.add_argument("--strict", action="store_true", help="stop at the first bad line")
    sub.set_defaults(run=_preprocess)

    sub = commands.add_parser("inspect", help="check .bin/.idx files and print their numbers")
    sub.add_argument("prefix", metavar="PREFIX", help="path without .bin and .idx")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--document", type=int, metavar="I", help="also print document I")
    sub.add_argument("--tokenizer", metavar="DIR|byte", help="print the document as text")
    sub.set_defaults(run=_inspect)

    sub = commands.add_parser("train-tokenizer", help="train a tokenizer on text")
    sub.add_argument("inputs", nargs="+", metavar="INPUT", help=inputs)
    sub.add_argument("--output", required=True, metavar="DIR", help="directory to save it in")
    sub.add_argument("--vocab-size", type=int, default=4096, help="pieces (default: 4096)")
    sub.add_argument("--kind", choices=["sentencepiece"], default="sentencepiece")
    sub.add_argument("--key", default="text", help="key of the text in JSON lines")
    sub.add_argument(
        "--sample-chars",
        type=int,
        default=8_000_000,
        help="characters to train on, a random part of the text (default: 8000000)",
    )
    sub.set_defaults(run=_train_tokenizer)
    return parser


def _preprocess(args: argparse.Namespace) -> int:
    from mcore_data.preprocessing import preprocess
    from mcore_data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer)
    report = preprocess(
        args.inputs,
        tokenizer=tokenizer,
        output=args.output,
        keys=tuple(args.key or ("text",)),
        append_eod=args.append_eod,
        workers=args.workers,
        strict=args.strict,
    )
    for line in report.bad_lines:
        print(f"mcore-data: skipped {line}", file=sys.stderr)
    if report.bad > len(report.bad_lines):
        print(f"mcore-data: ... {report.bad} skipped in all", file=sys.stderr)
    names = ", ".join(f"{output}.bin/.idx" for output in report.outputs)
    print(
        f"{names}: {report.documents:,} documents, {report.tokens:,} tokens "
        f"in {report.seconds:.1f} s ({report.tokens / report.seconds:,.0f} tokens/s)"
    )
    print(f"left out: {report.empty} empty, {report.bad} bad; repaired: {report.repaired}")
    return 0


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


def _train_tokenizer(args: argparse.Namespace) -> int:
    from mcore_data.preprocessing import train_sentencepiece

    begin = time.perf_counter()
    tokenizer = train_sentencepiece(
        args.inputs,
        output=args.output,
        vocab_size=args.vocab_size,
        key=args.key,
        sample_chars=args.sample_chars,
    )
    seconds = time.perf_counter() - begin
    print(f"{args.output}: {args.kind}, {tokenizer.vocab_size:,} pieces in {seconds:.1f} s")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status.

    What a user can set right (ValueError, OSError, IndexError) ends as one line on standard
    error and status 2.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except (ValueError, OSError, IndexError) as error:
        print(f"mcore-data: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mcore-data: interrupted, nothing was written", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
