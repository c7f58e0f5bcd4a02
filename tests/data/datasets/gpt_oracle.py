"""Run megatron-core's datasets on CPU; a script of its own, since it loads torch and all.

Usage: python gpt_oracle.py CONFIGS.json OUT.npz. Each configuration names a prefix, which is
read, or written first when it carries documents.
"""

import json
import sys
import tempfile
import warnings

import numpy as np

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import (  # noqa: E402
    IndexedDataset,
    IndexedDatasetBuilder,
)


class Tokenizer:
    vocab_size, eod, pad = 1000, 0, -1
    unique_identifiers: dict = {"class": "Tokenizer"}  # noqa: RUF012


def write(prefix, documents, dtype):
    """`documents`: lists of sequences."""
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.dtype(dtype).type)
    for sequences in documents:
        flat = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.tensor(flat, dtype=torch.int64), [len(s) for s in sequences])
    builder.finalize(prefix + ".idx")


def splits(config, cache):
    if "parts" in config:
        files = {"blend_per_split": [part and tuple(part) for part in config["parts"]]}
    else:
        blend = tuple(config.get("blend") or ([config["prefix"]], None))
        files = {"split": config["split"], "blend": blend}
    made = GPTDatasetConfig(
        random_seed=config["seed"],
        sequence_length=config["seq_length"],
        **files,
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=config["reset_positions"],
        reset_attention_mask=config["reset_attention"],
        eod_mask_loss=config["mask_after_eod"],
        create_attention_mask=True,
        add_extra_token_to_sequence=config["extra_token"],
        drop_last_partial_validation_sequence=config["drop_last"],
    )
    return BlendedMegatronDatasetBuilder(
        GPTDataset, config["num_samples"], lambda: True, made
    ).build()


def main():
    with open(sys.argv[1]) as file:
        configs = json.load(file)
    # Blends ask for the rank.
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    out = {}
    for i, config in enumerate(configs):
        if "documents" in config:
            write(config["prefix"], config["documents"], config["dtype"])
        if config.get("read"):
            reader = IndexedDataset(config["prefix"], mmap=True)
            out[f"{i}/lengths"] = np.array(reader.sequence_lengths)
            out[f"{i}/documents"] = np.array(reader.document_indices)
            out[f"{i}/tokens"] = np.concatenate([reader[j] for j in range(len(reader))])
            continue
        with tempfile.TemporaryDirectory() as cache:
            for part, dataset in enumerate(splits(config, cache)):
                if dataset is None:
                    continue
                for name in (
                    "indices",
                    "document_index",
                    "sample_index",
                    "shuffle_index",
                    "dataset_index",
                    "dataset_sample_index",
                ):
                    if hasattr(dataset, name):
                        out[f"{i}/{part}/{name}"] = np.array(getattr(dataset, name))
                chosen = range(0, len(dataset), config["stride"])
                samples = [dataset[j] for j in chosen]
                for key in samples[0] if samples else ():
                    out[f"{i}/{part}/{key}"] = np.stack([np.asarray(s[key]) for s in samples])
    np.savez(sys.argv[2], **out)


if __name__ == "__main__":
    main()
