"""The reference's own datasets as oracle, where megatron-core is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mcore_data import GPTDataset, IndexedReader, IndexedWriter, document_ranges, parse_split

CONFIGS = int(os.environ.get("MCORE_ORACLE_CONFIGS", "20"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed (pip install --no-deps megatron-core==0.16.1)",
    ),
]


def _run(configs, folder):
    (folder / "configs.json").write_text(json.dumps(configs))
    script = Path(__file__).with_name("gpt_oracle.py")
    subprocess.run(
        [sys.executable, str(script), str(folder / "configs.json"), str(folder / "out.npz")],
        check=True,
        capture_output=True,
        timeout=250,
    )
    with np.load(folder / "out.npz") as out:
        return dict(out)


def _random_config(rng, folder, i):
    splits = ["100,0,0", "90,10,0", "969,30,1", "0.7,0.2,0.1", "1,1,1", "99,1"]
    sizes = [int(rng.integers(1, 400)) if rng.random() < 0.8 else None for _ in range(3)]
    return {
        "prefix": str(folder / f"c{i}"),
        "seq_length": int(rng.choice([1, 2, 7, 8, 33, 64, 70])),
        "seed": int(rng.integers(0, 2**31)),
        "split": splits[rng.integers(len(splits))],
        "num_samples": sizes,
        "reset_positions": bool(rng.integers(2)),
        "reset_attention": bool(rng.integers(2)),
        "mask_after_eod": bool(rng.integers(2)),
        "extra_token": bool(rng.random() < 0.7),
        "drop_last": bool(rng.random() < 0.7),
        "stride": int(rng.integers(5, 40)),
    }


def _write(rng, prefix):
    longest = int(rng.integers(2, 200))
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(int(rng.integers(30, 300))):
            lengths = rng.integers(1, longest, int(rng.integers(1, 3)))
            tokens = rng.integers(0, 40, lengths.sum())
            tokens[-1] = 0
            writer.add_document(tokens, lengths.tolist())


def _dense(bounds):
    """The oracle's mask: True where attention is forbidden."""
    segment = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    causal = np.tril(np.ones((len(segment),) * 2, bool))
    return ~(causal & (segment[:, None] == segment[None]))


def test_samples_are_the_references(tmp_path):
    """Same documents per split, same samples in the same order, same masks (U13)."""
    rng = np.random.default_rng(int(os.environ.get("MCORE_ORACLE_SEED", "0")))
    configs = [_random_config(rng, tmp_path, i) for i in range(CONFIGS)]
    for config in configs:
        _write(rng, config["prefix"])
        count = len(IndexedReader(config["prefix"]))
        weights = parse_split(config["split"])
        ranges = document_ranges(weights, count)
        if any(w and not r for w, r in zip(weights, ranges, strict=True)):
            config["split"] = "1,1,1"  # the oracle never ends on a part without documents
    out = _run(configs, tmp_path)
    compared = 0
    for i, config in enumerate(configs):
        reader = IndexedReader(config["prefix"])
        for part, documents in enumerate(document_ranges(config["split"], len(reader))):
            if f"{i}/{part}/tokens" not in out:
                continue
            assert out[f"{i}/{part}/indices"].tolist() == list(documents), config
            ours = GPTDataset(
                reader,
                documents,
                num_samples=config["num_samples"][part],
                eod_id=0,
                drop_last=config["drop_last"] or part != 1,
                **{
                    name: config[name]
                    for name in (
                        "seq_length",
                        "seed",
                        "reset_positions",
                        "reset_attention",
                        "mask_after_eod",
                        "extra_token",
                    )
                },
            )
            theirs = {k: out[f"{i}/{part}/{k}"] for k in ("tokens", "labels", "loss_mask")}
            for mine, name in (
                ("documents", "document_index"),
                ("samples", "sample_index"),
                ("shuffle", "shuffle_index"),
            ):
                np.testing.assert_array_equal(
                    getattr(ours.index, mine), out[f"{i}/{part}/{name}"], str(config)
                )
            chosen = range(0, len(ours), config["stride"])
            assert len(chosen) == len(theirs["tokens"]), config
            for j in range(len(chosen)):
                sample = ours[chosen[j]]
                np.testing.assert_array_equal(sample.tokens, theirs["tokens"][j], str(config))
                np.testing.assert_array_equal(sample.loss_mask, theirs["loss_mask"][j])
                valid = sample.loss_mask > 0
                np.testing.assert_array_equal(sample.labels[valid], theirs["labels"][j][valid])
                np.testing.assert_array_equal(
                    sample.positions, out[f"{i}/{part}/position_ids"][j], str(config)
                )
                mask = out[f"{i}/{part}/attention_mask"][j].reshape(2 * (len(valid),))
                np.testing.assert_array_equal(_dense(sample.cu_seqlens), mask, str(config))
            compared += len(ours)
    assert compared > 20 * CONFIGS


def test_files_are_read_both_ways(tmp_path):
    """Either side reads what the other wrote, and for equal documents the bytes are equal."""
    rng = np.random.default_rng(1)
    pairs, configs = [], []
    for dtype in ("uint8", "uint16", "int32", "int64"):
        documents = [
            [rng.integers(0, 250, rng.integers(0, 20)).tolist() for _ in range(rng.integers(1, 4))]
            for _ in range(50)
        ]
        ours, theirs = str(tmp_path / f"ours-{dtype}"), str(tmp_path / f"theirs-{dtype}")
        with IndexedWriter(ours, dtype) as writer:
            for sequences in documents:
                writer.add_document(
                    np.concatenate(sequences).astype(int), [len(s) for s in sequences]
                )
        configs.append({"prefix": theirs, "documents": documents, "dtype": dtype, "read": True})
        configs.append({"prefix": ours, "read": True})
        pairs.append((ours, theirs))
    out = _run(configs, tmp_path)
    for ours, theirs in pairs:
        for suffix in (".bin", ".idx"):
            assert Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()
    for i, config in enumerate(configs):
        reader = IndexedReader(config["prefix"])
        np.testing.assert_array_equal(out[f"{i}/lengths"], reader.lengths)
        np.testing.assert_array_equal(out[f"{i}/documents"], reader.document_indices)
        np.testing.assert_array_equal(out[f"{i}/tokens"], np.concatenate(list(reader)))
