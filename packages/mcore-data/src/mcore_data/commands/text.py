"""From text to files: `preprocess`, `train-tokenizer`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mcore_data.commands import Commands
    from mcore_data.preprocessing import PreprocessReport
    from mcore_data.tokenizers import Tokenizer

_INPUTS: Final = (
    "files, folders or glob patterns: JSONL (.jsonl, .ndjson, .json) or text, also .gz and .zst, "
    "and Parquet"
)


def _workers() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def add(commands: Commands) -> None:
    """Add the subcommands."""
    sub = commands.add_parser("preprocess", help="tokenise text into .bin/.idx files")
    sub.add_argument("inputs", nargs="+", metavar="INPUT", help=_INPUTS)
    sub.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="directory, file (.model, .tiktoken, tekken*.json), byte, or null:N (text is ids)",
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
        "--split-sentences", action="store_true", help="make each sentence a sequence of its own"
    )
    sub.add_argument(
        "--workers", type=int, default=_workers(), help="processes (default: usable cores)"
    )
    sub.add_argument("--strict", action="store_true", help="stop at the first bad line")
    sub.add_argument(
        "--resume",
        action="store_true",
        help="keep what is done beside the output; the same command goes on from there",
    )
    sub.add_argument(
        "--partition", metavar="I/N", help="tokenise the I-th of N parts, counted from 1"
    )
    sub.add_argument(
        "--chat",
        nargs="?",
        const="",
        metavar="TEMPLATE",
        help="lines hold conversations (key: messages), written by the Jinja file TEMPLATE "
        "(default: the template of the tokenizer's directory)",
    )
    sub.add_argument(
        "--learn",
        choices=["assistant", "last", "all"],
        help="with --chat: what training learns (default: what the assistant says)",
    )
    sub.set_defaults(run=_preprocess)

    sub = commands.add_parser("train-tokenizer", help="train a tokenizer on text")
    sub.add_argument("inputs", nargs="+", metavar="INPUT", help=_INPUTS)
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


def _partition(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    part, slash, total = text.partition("/")
    if slash and part.isdecimal() and total.isdecimal() and 1 <= int(part) <= int(total):
        return int(part) - 1, int(total)
    raise ValueError(f"--partition is {text!r}, it must be I/N with I from 1 to N, such as 2/4")


def _preprocess(args: argparse.Namespace) -> int:
    from mcore_data.preprocessing import preprocess
    from mcore_data.tokenizers import load_tokenizer

    partition = _partition(args.partition)
    if args.learn is not None and args.chat is None:
        raise ValueError("--learn needs --chat")
    tokenizer = load_tokenizer(args.tokenizer)
    if args.chat is not None:
        return _report(_chat(args, tokenizer, partition))
    return _report(
        preprocess(
            args.inputs,
            tokenizer=tokenizer,
            output=args.output,
            keys=tuple(args.key or ("text",)),
            append_eod=args.append_eod,
            sentences=args.split_sentences,
            workers=args.workers,
            strict=args.strict,
            resume=args.resume,
            partition=partition,
        )
    )


def _chat(
    args: argparse.Namespace, tokenizer: Tokenizer, partition: tuple[int, int]
) -> PreprocessReport:
    from pathlib import Path

    from mcore_data.chat import ChatTemplate
    from mcore_data.preprocessing import preprocess_chat

    given = {
        "--append-eod": args.append_eod,
        "--split-sentences": args.split_sentences,
        "more than one --key": len(args.key or ()) > 1,
    }
    if wrong := [name for name, value in given.items() if value]:
        raise ValueError(f"{wrong[0]} does not go with --chat")
    folder = args.tokenizer if Path(args.tokenizer).is_dir() else None
    return preprocess_chat(
        args.inputs,
        template=ChatTemplate.load(folder, tokenizer, file=args.chat or None),
        tokenizer=tokenizer,
        output=args.output,
        key=args.key[0] if args.key else "messages",
        learn=args.learn or "assistant",
        workers=args.workers,
        strict=args.strict,
        resume=args.resume,
        partition=partition,
    )


def _report(report: PreprocessReport) -> int:
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
