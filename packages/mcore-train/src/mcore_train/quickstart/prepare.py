"""Text, tokenizer and token files of the quickstart."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from mcore_data import IndexedReader, load_tokenizer, preprocess, train_sentencepiece
from mcore_train.entropy import bigram_entropy, unigram_entropy
from mcore_train.quickstart.corpus import source_files, split_files
from mcore_train.quickstart.stages import Stages

VOCABULARY = 4096
PARTS = ("train", "validation")


def prepare_corpus(stages: Stages) -> dict[str, Any]:
    """Choose the documents: the standard library's sources, split into two parts."""
    root = Path(sysconfig.get_paths()["stdlib"])

    def work() -> dict[str, Any]:
        train, validation = split_files(source_files(root), root)
        size = sum(path.stat().st_size for path in (*train, *validation))
        return {
            "root": str(root),
            "train": [str(path) for path in train],
            "validation": [str(path) for path in validation],
            "megabytes": round(size / 1e6, 1),
        }

    return stages.run(
        "corpus",
        {"root": str(root), "python": sys.version},
        work,
        lambda r: (
            f"{len(r['train'])} documents to train on and {len(r['validation'])} to validate, "
            f"{r['megabytes']} MB of Python from {r['root']}"
        ),
    )


def prepare_tokenizer(stages: Stages, out: Path, corpus: dict[str, Any]) -> dict[str, Any]:
    """Train a sentencepiece BPE tokenizer on the training part."""

    def work() -> dict[str, Any]:
        tokenizer = train_sentencepiece(
            corpus["train"], output=out / "tokenizer", vocab_size=VOCABULARY
        )
        return {"folder": str(out / "tokenizer"), "vocab_size": tokenizer.vocab_size}

    return stages.run(
        "tokenizer",
        {"corpus": corpus, "vocab_size": VOCABULARY, "folder": str(out)},
        work,
        lambda r: f"sentencepiece BPE of {r['vocab_size']} pieces in {r['folder']}",
        outputs=[out / "tokenizer" / "tokenizer_config.json"],
    )


def prepare_data(
    stages: Stages, out: Path, corpus: dict[str, Any], tokenizer: dict[str, Any], *, progress: bool
) -> dict[str, Any]:
    """Encode both parts into `.bin/.idx` files and measure the validation text."""

    def work() -> dict[str, Any]:
        results: dict[str, Any] = {}
        for part in PARTS:
            prefix = out / "data" / part
            prefix.parent.mkdir(parents=True, exist_ok=True)
            report = preprocess(
                corpus[part],
                tokenizer=load_tokenizer(tokenizer["folder"]),
                output=prefix,
                append_eod=True,
                workers=min(os.cpu_count() or 1, 8),
                progress=progress,
            )
            results[part] = {"prefix": str(prefix), "tokens": report.tokens}
        reader = IndexedReader(out / "data" / "validation")
        tokens = np.concatenate([reader.get(i) for i in range(len(reader))])
        results["unigram"] = unigram_entropy(tokens)
        results["bigram"] = bigram_entropy(tokens)
        return results

    return stages.run(
        "data",
        {"corpus": corpus, "tokenizer": tokenizer},
        work,
        lambda r: (
            f"{r['train']['tokens']:,} tokens to train on, {r['validation']['tokens']:,} to "
            f"validate (entropy: unigram {r['unigram']:.2f}, bigram {r['bigram']:.2f} nats) in "
            f"{Path(r['train']['prefix']).parent}"
        ),
        outputs=[out / "data" / f"{part}.{kind}" for part in PARTS for kind in ("bin", "idx")],
    )
