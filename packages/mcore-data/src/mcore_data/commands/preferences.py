"""From pairs of answers to files: `preferences`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_data.commands import Commands


def add(commands: Commands) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "preferences", help="tokenise prompts with a chosen and a rejected answer"
    )
    sub.add_argument(
        "input", metavar="JSONL", help="lines with prompt (or none), chosen and rejected"
    )
    sub.add_argument("--tokenizer", required=True, metavar="NAME", help="directory, file or byte")
    sub.add_argument(
        "--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    sub.add_argument(
        "--template",
        metavar="FILE",
        help="Jinja file that writes the messages (default: the one of the tokenizer's directory)",
    )
    sub.set_defaults(run=_preferences)


def _preferences(args: argparse.Namespace) -> int:
    from pathlib import Path

    from mcore_data.chat import ChatTemplate
    from mcore_data.preferences import preprocess_preferences
    from mcore_data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer)
    folder = args.tokenizer if Path(args.tokenizer).is_dir() else None
    count = preprocess_preferences(
        args.input,
        template=ChatTemplate.load(folder, tokenizer, file=args.template),
        tokenizer=tokenizer,
        output=args.output,
    )
    print(f"{args.output}.bin/.idx: {count:,} pairs")
    return 0
