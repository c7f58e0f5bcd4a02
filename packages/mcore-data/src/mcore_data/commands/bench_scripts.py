"""What `bench` measures, as scripts: each runs in processes of its own.

Peak memory is then its own, and nothing is warm that the script has not warmed. They take a prefix,
a sequence length, a seed and the name of what is measured, and print one line of JSON.
"""

from typing import Final

_COMMON: Final = """
import hashlib, json, resource, sys, time
import numpy as np

prefix, seq_length, seed, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def peak():
    try:  # of this process alone: the other figure begins with what its parent had
        with open("/proc/self/status") as file:
            return int(file.read().split("VmHWM:")[1].split()[0])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def measure(build):
    seconds, before = [], peak()
    for _ in range(2):
        begin = time.process_time()  # other work on the machine disturbs it least
        parts = build()
        seconds.append(time.process_time() - begin)
    grown = peak() - before
    digest = hashlib.blake2b()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    row = {"seconds": min(seconds), "peak_mb": grown / 1000, "digest": digest.hexdigest()}
    print(json.dumps(row))

def tokens_per_second(read, num_samples):
    read(min(num_samples, 64))  # the file and the code are warm
    begin = time.process_time()
    tokens = read(num_samples)
    print(json.dumps({"tokens_per_second": tokens / (time.process_time() - begin)}))
"""
_MEGATRON: Final = (
    _COMMON
    + """
import warnings
warnings.filterwarnings("ignore")
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

class Tokenizer:
    vocab_size, eod, pad = 1000, 0, -1
    unique_identifiers = {"class": "Tokenizer"}

reader = IndexedDataset(prefix, mmap=True)
documents = np.arange(len(reader), dtype=np.int32)
config = GPTDatasetConfig(
    random_seed=seed, sequence_length=seq_length, split="1,0,0", blend=([prefix], None),
    tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
    eod_mask_loss=False, create_attention_mask=False,
)
config.mock = True  # keeps no files

def make():
    return GPTDataset(reader, prefix, documents, None, Split.train, config)
"""
)
INDEX: Final = (
    _COMMON
    + """
from mcore_data.datasets import build_gpt_index, compiled
from mcore_data.indexed import IndexedReader

if kind == "numpy":
    compiled.available = lambda: False
else:
    compiled.WORTH_COMPILING = 0  # whatever the size
    small = np.full(8, 8, np.int32)
    build_gpt_index(small, np.arange(8), seq_length=8, num_samples=None, seed=0)
reader = IndexedReader(prefix)
int(reader.lengths.sum(dtype=np.int64))

def build():
    index = build_gpt_index(
        reader.lengths, range(len(reader)), seq_length=seq_length, num_samples=None, seed=seed
    )
    return index.documents, index.samples, index.shuffle

measure(build)
"""
)
MEGATRON_INDEX: Final = (
    _MEGATRON
    + """
int(reader.sequence_lengths.sum(dtype=np.int64))

def build():
    made = make()
    return made.document_index, made.sample_index, made.shuffle_index

measure(build)
"""
)
LOADER: Final = (
    _COMMON
    + """
from mcore_data import BatchSampler, GPTDataset, IndexedReader, MicroBatchLoader

dataset = GPTDataset(IndexedReader(prefix), seq_length=seq_length, seed=seed)
sampler = BatchSampler(len(dataset), 4)
options = {"dp_rank": 0, "dp_size": 1, "micro_batch_size": 4, "prefetch": 0}

def read(count):
    loader = MicroBatchLoader(dataset, sampler, **options)
    return sum(batch["tokens"].size for _ in range(count // 4) for batch in next(loader))

tokens_per_second(read, len(dataset))
"""
)
MEGATRON_LOADER: Final = (
    _MEGATRON
    + """
from torch.utils.data import default_collate

dataset = make()

def read(count):
    batches = (default_collate([dataset[i + k] for k in range(4)]) for i in range(0, count - 3, 4))
    return sum(batch["tokens"].numel() for batch in batches)

tokens_per_second(read, len(dataset))
"""
)
