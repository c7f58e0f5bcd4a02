"""Look at what training will see: `plan`, `show`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_data.commands import Commands
    from mcore_data.datasets import Corpus, Sample
    from mcore_data.tokenizers import Tokenizer


def add(commands: Commands) -> None:
    """Add the subcommands."""
    sub = commands.add_parser(
        "plan", help="print documents, tokens, samples and epochs of every part and file"
    )
    sub.add_argument(
        "blend", nargs="*", metavar="[WEIGHT] PREFIX", help="files, or weight and file in turn"
    )
    sub.add_argument("--split", metavar="W,W,W", help="cut the files into the three parts")
    sub.add_argument("--parts", metavar="JSON", help="file with a blend for each part")
    sub.add_argument("--seq-length", type=int, required=True, metavar="S", help="tokens a sample")
    for name in ("train", "validation", "test"):
        sub.add_argument(
            f"--{name}",
            type=int,
            metavar="N",
            help=f"{name} samples (default: every sample once; 0: none)",
        )
    sub.add_argument(
        "--each-validation", action="store_true", help="every validation file is a set of its own"
    )
    sub.add_argument(
        "--png", metavar="FILE", help="also draw the lengths of documents (needs matplotlib)"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(run=_plan)

    sub = commands.add_parser("show", help="print a sample: tokens, text, loss mask, positions")
    sub.add_argument("prefix", metavar="PREFIX", help="path without .bin and .idx")
    sub.add_argument("--sample", type=int, default=0, metavar="N", help="which (default: 0)")
    sub.add_argument("--seq-length", type=int, default=64, metavar="S", help="default: 64")
    sub.add_argument("--seed", type=int, default=1234, help="of the order (default: 1234)")
    sub.add_argument("--tokenizer", metavar="DIR|byte", help="print text too")
    for name, text in (
        ("reset-positions", "count positions from 0 in every document"),
        ("reset-attention", "make every document a segment"),
        ("mask-eod-loss", "no loss on EOD labels"),
        ("mask-after-eod", "no loss after EOD tokens"),
    ):
        sub.add_argument(f"--{name}", action="store_true", help=text)
    sub.add_argument("--eod-id", type=int, metavar="ID", help="default: the tokenizer's")
    sub.add_argument("--color", choices=["auto", "always", "never"], default="auto")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(run=_show)


def _corpus(args: argparse.Namespace) -> Corpus:
    from mcore_data.datasets import Blend, Corpus

    if bool(args.blend) == bool(args.parts):
        raise ValueError("give either files or --parts JSON")
    if args.parts:
        if args.split:
            raise ValueError("--split does not go with --parts, where each part has its own files")
        return Corpus.read(args.parts, each_validation=args.each_validation)
    return Corpus(
        train=Blend.parse(args.blend), split=args.split, each_validation=args.each_validation
    )


def _plan(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    rows = _corpus(args).plan(
        train=args.train,
        validation=args.validation,
        test=args.test,
        seq_length=args.seq_length,
    )
    if args.png:
        _draw([row.prefix for row in rows], args)
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    width = max([len(row.part) for row in rows] + [len("part")])
    titles = f"{'documents':>12}{'tokens':>18}{'samples':>14}{'epochs':>9}"
    print(f"{'part':{width}}{titles}  file")
    parts = list(dict.fromkeys(row.part for row in rows))
    for part in parts:
        mine = [row for row in rows if row.part == part]
        for row in mine:
            numbers = f"{row.documents:12,}{row.tokens:18,}{row.samples:14,}{row.epochs:9.2f}"
            print(f"{part:{width}}{numbers}  {row.prefix}")
        if len(mine) > 1:
            sums = [
                sum(getattr(row, n) for row in mine) for n in ("documents", "tokens", "samples")
            ]
            epochs = sums[2] * args.seq_length / sums[1] if sums[1] else 0.0
            print(f"{'':{width}}{sums[0]:12,}{sums[1]:18,}{sums[2]:14,}{epochs:9.2f}  together")
    return 0


def _draw(prefixes: list[str], args: argparse.Namespace) -> None:
    from mcore_data.datasets import Blend
    from mcore_data.datasets.documents import document_lengths
    from mcore_data.draw import draw_lengths
    from mcore_data.indexed import IndexedReader

    files = Blend(prefixes=tuple(dict.fromkeys(prefixes)))
    lengths = {}
    for name, prefix in zip(files.names(), files.prefixes, strict=True):
        with IndexedReader(prefix) as reader:
            lengths[name] = document_lengths(reader)
    draw_lengths(lengths, args.png, seq_length=args.seq_length)


def _sample(args: argparse.Namespace, tokenizer: Tokenizer | None) -> tuple[Sample, int]:
    from mcore_data.datasets import (
        DocumentDataset,
        GPTDataset,
        PreferenceDataset,
        SampleSource,
    )
    from mcore_data.datasets.preferences import REJECTED
    from mcore_data.indexed import IndexedReader

    reader = IndexedReader(args.prefix)
    source: SampleSource
    if reader.modes is not None and (reader.modes == REJECTED).any():
        source = PreferenceDataset(reader, max_length=args.seq_length)
    elif reader.modes is not None:  # conversations
        source = DocumentDataset(reader, max_length=args.seq_length)
    else:
        eod = args.eod_id
        source = GPTDataset(
            reader,
            seq_length=args.seq_length,
            seed=args.seed,
            eod_id=tokenizer.eod_id if eod is None and tokenizer is not None else eod,
            reset_positions=args.reset_positions,
            reset_attention=args.reset_attention,
            mask_eod_loss=args.mask_eod_loss,
            mask_after_eod=args.mask_after_eod,
        )
    return source[args.sample], len(source)


def _show(args: argparse.Namespace) -> int:
    from mcore_data.tokenizers import load_tokenizer

    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    sample, total = _sample(args, tokenizer)
    if args.json:
        fields: dict[str, Any] = {name: value.tolist() for name, value in vars(sample).items()}
        if tokenizer is not None:
            fields["text"] = tokenizer.decode(fields["tokens"])
        print(json.dumps(fields))
        return 0
    colour = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())
    learned = int(sample.loss_mask.sum())
    segments = len(sample.cu_seqlens) - 1
    print(
        f"{args.prefix}: sample {args.sample} of {total:,}: {len(sample.tokens):,} tokens, "
        f"{learned:,} with loss, {segments} segment{'s' if segments > 1 else ''}"
    )
    print(f"{'place':>6}{'segment':>9}{'position':>9}{'token':>9}{'label':>9}{'loss':>6}  text")
    bounds = sample.cu_seqlens.tolist()
    segment = 0
    for place, token in enumerate(sample.tokens.tolist()):
        while place >= bounds[segment + 1]:
            segment += 1
        text = "" if tokenizer is None else repr(tokenizer.decode([token]))
        line = (
            f"{place:6}{segment:9}{int(sample.positions[place]):9}{token:9}"
            f"{int(sample.labels[place]):9}{float(sample.loss_mask[place]):6g}  {text}"
        )
        print(_painted(line, segment, bool(sample.loss_mask[place])) if colour else line)
    return 0


def _painted(line: str, segment: int, learned: bool) -> str:
    """Return the line in the colour of its segment, dim where there is no loss."""
    code = 36 if segment % 2 == 0 else 33
    return f"\x1b[{code if learned else f'2;{code}'}m{line}\x1b[0m"
