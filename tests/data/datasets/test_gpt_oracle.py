"""Megatron-LM's own datasets as oracle, where megatron-core is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mcore_data import (
    Blend,
    BlendedDataset,
    Corpus,
    GPTDataset,
    IndexedReader,
    IndexedWriter,
    document_ranges,
    parse_split,
)

CONFIGS = int(os.environ.get("MCORE_ORACLE_CONFIGS", "20"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300 + 20 * CONFIGS),
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
        timeout=240 + 10 * CONFIGS,
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


def _write(rng, prefix, least=2):
    longest = int(rng.integers(least, 200))
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


def test_samples_are_those_of_megatron(tmp_path):
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


def _random_blend(rng, folder, i):
    """Files with weights or without, cut by a split or given for each part."""
    config = _random_config(rng, folder, i)
    prefixes = [f"{folder}/b{i}-{k}" for k in range(int(rng.integers(1, 6)))]
    for prefix in prefixes:
        _write(rng, prefix, least=60)  # the oracle never ends on a part too short for one sample
    weights = None
    if rng.random() < 0.6:
        weights = (rng.random(len(prefixes)) ** 3 + 1e-4).tolist()
    sizes = [int(rng.integers(1, 400)) for _ in range(3)]
    if weights is None and rng.random() < 0.6:
        sizes = [None] * 3
    config |= {"seq_length": int(rng.choice([3, 8, 33])), "split": "8,1,1", "num_samples": sizes}
    if rng.random() < 0.4:
        one = prefixes[: int(rng.integers(1, len(prefixes) + 1))]
        config["parts"] = [[prefixes, weights], [one, None], None]
        config["num_samples"][2] = 0
    else:
        config["blend"] = [prefixes, weights]
    return config | {"extra_token": True, "drop_last": True}


def test_blends_are_those_of_megatron(tmp_path):
    """U10: the same sources in the same order, and the same tokens, for any kind of blend."""
    rng = np.random.default_rng(int(os.environ.get("MCORE_ORACLE_SEED", "0")) + 1)
    configs = [_random_blend(rng, tmp_path, i) for i in range(CONFIGS)]
    out = _run(configs, tmp_path)
    blended = 0
    for i, config in enumerate(configs):

        def blend(entry):
            return Blend(prefixes=tuple(entry[0]), weights=entry[1] and tuple(entry[1]))

        if "parts" in config:
            train, validation, _ = config["parts"]
            corpus = Corpus(train=blend(train), validation={"validation": blend(validation)})
        else:
            corpus = Corpus(train=blend(config["blend"]), split=config["split"])
        sizes = dict(zip(("train", "validation", "test"), config["num_samples"], strict=True))
        parts = corpus.build(
            **sizes,
            seq_length=config["seq_length"],
            seed=config["seed"],
            eod_id=0,
            reset_positions=config["reset_positions"],
            mask_after_eod=config["mask_after_eod"],
        )
        for part, ours in enumerate((parts.train, parts.validation["validation"], parts.test)):
            theirs = out.get(f"{i}/{part}/tokens")
            if ours is None:
                assert theirs is None
                continue
            if isinstance(ours, BlendedDataset):
                blended += 1
                for mine, name in (
                    ("sources", "dataset_index"),
                    ("samples", "dataset_sample_index"),
                ):
                    np.testing.assert_array_equal(
                        getattr(ours.index, mine), out[f"{i}/{part}/{name}"], str(config)
                    )
            chosen = range(0, len(ours), config["stride"])
            assert len(chosen) == len(theirs), config
            for j, index in enumerate(chosen):
                sample = ours[index]
                np.testing.assert_array_equal(sample.tokens, theirs[j], str(config))
                for mine, name in (("loss_mask", "loss_mask"), ("positions", "position_ids")):
                    np.testing.assert_array_equal(
                        getattr(sample, mine), out[f"{i}/{part}/{name}"][j], str(config)
                    )
    assert blended > CONFIGS


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
