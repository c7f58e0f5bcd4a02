"""One reader per replica, the same micro-batches on all of its ranks, the same stream anywhere."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from mcore_data import GPTDataset, Sample, load_tokenizer
from mcore_data.tokenizers.train import train_bpe
from mcore_models import TokenBatch
from mcore_parallel import ParallelConfig, ParallelMesh, init_from_env
from mcore_parallel.testing import RankPool
from mcore_train.config import TrainConfig
from mcore_train.data import ReplicaData, check_tokens, share_batches, tokenizer_folder
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import world_size

sys.path.append(str(Path(__file__).parent))
from toy import toy, write_tokens

LENGTH = 8
Plain = dict[str, Any]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens") / "toy")


def packed(prefix: Path, layout: str = "tp=1", **fields: Any) -> TrainConfig:
    """Documents of 1 to 12 tokens: a sample holds several, and every field of a batch matters."""
    data = {
        "mock": False,
        "train": str(prefix),
        "split": "6,4",
        "seq_length": LENGTH,
        "eod_id": 0,
        "mask_eod_loss": True,
        "reset_positions": True,
        "reset_attention": True,
    }
    batch = {"global_size": 4, "micro_size": 1}
    config = toy(**{"data": data, "batch": batch, "evaluate": {"windows": 7}, **fields})
    return dataclasses.replace(config, parallel=ParallelConfig.parse(layout))


def plain(batch: TokenBatch) -> Plain:
    """Every field in a form that `==` compares and pickle carries."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {
        name: (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def sample_ids(batch: Plain) -> list[int]:
    """The numbers of the samples of a batch; below 0 where a row stands for none."""
    rows: list[int] = batch["rows"][1]
    return [row // LENGTH for row in rows[::LENGTH]]


def stream(config: TrainConfig, steps: int, consumed: int = 0) -> list[list[Plain]]:
    """The micro-batches of the first steps in one process."""
    data = ReplicaData(config, ParallelMesh.single())
    data.load_state_dict(data.state_dict(consumed))
    batches = data.batches()
    found = [[plain(batch) for batch in next(batches)] for _ in range(steps)]
    data.close()
    return found


def example(kind: str) -> list[TokenBatch]:
    generator = torch.Generator().manual_seed(7)

    def tokens(samples: int, length: int) -> torch.Tensor:
        return torch.randint(0, 50, (samples, length), generator=generator)

    uniform = TokenBatch.from_samples(
        tokens(2, 5),
        labels=tokens(2, 5),
        loss_mask=torch.rand(2, 5, generator=generator),
        sample_ids=[9, 4],
    )
    documents = TokenBatch.from_samples(
        tokens(1, 7),
        labels=tokens(1, 7),
        # Halves: what follows them in the block of bytes is not aligned for its dtype.
        loss_mask=torch.rand(1, 7, generator=generator).bfloat16(),
        cu_seqlens=torch.tensor([0, 3, 4, 7]),
        sample_ids=[1 << 40],
    )
    bare = TokenBatch.from_samples(tokens(3, 1))
    kinds = {
        "none": [],
        "uniform": [uniform],
        "packed": [documents],
        "several": [documents, bare, uniform, documents],
    }
    return kinds[kind]


def share_rank(kind: str) -> list[Plain]:
    init_from_env(device="cpu")
    mesh = ParallelMesh.create(ParallelConfig(tp=2))
    assert mesh is not None
    shared = share_batches(None if mesh.rank else example(kind), mesh.replica)
    mesh.close()
    return [plain(batch) for batch in shared]


@pytest.mark.parametrize("kind", ["none", "uniform", "packed", "several"])
def test_a_broadcast_keeps_every_field(ranks: RankPool, kind: str) -> None:
    expected = [plain(batch) for batch in example(kind)]
    assert ranks.run(share_rank, 2, kind) == [expected, expected]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank was given, and how many samples it read itself."""

    replica: int
    train: list[list[Plain]]
    validation: list[Plain]
    reads: int


def counted(reads: list[int]) -> Callable[[GPTDataset, int], Sample]:
    original = GPTDataset.__getitem__

    def read(self: GPTDataset, index: int) -> Sample:
        reads.append(index)
        return original(self, index)

    return read


def read_rank(tree: dict[str, Any], steps: int) -> Seen:
    config = config_from_tree(tree)
    init_from_env(device="cpu")
    mesh = ParallelMesh.create(config.parallel)
    assert mesh is not None
    reads: list[int] = []
    with mock.patch.object(GPTDataset, "__getitem__", counted(reads)):
        data = ReplicaData(config, mesh)
        batches = data.batches()
        train = [[plain(batch) for batch in next(batches)] for _ in range(steps)]
        validation = [plain(batch) for batch in data.validation_batches("validation")]
        data.close()
    replica = mesh.dp.rank
    mesh.close()
    return Seen(replica=replica, train=train, validation=validation, reads=len(reads))


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "dp=2", "dp=4", "tp=2,pp=2,dp=2"])
def test_replicas_share_the_stream_of_one_process(
    ranks: RankPool, prefix: Path, layout: str
) -> None:
    """One reader per replica; disjoint samples, in order those of one process."""
    steps = 3
    parallel = ParallelConfig.parse(layout)
    size, replicas = world_size(parallel), parallel.dp or 1
    tree = config_to_tree(packed(prefix, layout))
    seen: list[Seen] = ranks.run(read_rank, size, tree, steps)
    first: dict[int, Seen] = {}
    for rank in seen:
        one = first.setdefault(rank.replica, rank)
        assert rank.train == one.train
        assert rank.validation == one.validation
    assert sorted(first) == list(range(replicas))
    for replica in first:
        readers = [rank for rank in seen if rank.replica == replica and rank.reads]
        assert len(readers) == 1

    for step, whole in enumerate(stream(packed(prefix), steps)):
        parts = [first[replica].train[step] for replica in range(replicas)]
        assert [batch for cut in zip(*parts, strict=True) for batch in cut] == whole
        ids = [i for batch in whole for i in sample_ids(batch)]
        assert len(set(ids)) == len(ids) == 4

    windows: list[int] = []
    sizes = set()
    for one in first.values():
        sizes.add(len(one.validation))
        for batch in one.validation:
            ids, mask = sample_ids(batch), batch["loss_mask"][1]
            for row, sample in enumerate(ids):
                if sample < 0:
                    assert not any(mask[row * LENGTH :][:LENGTH])
            windows += [sample for sample in ids if sample >= 0]
    assert sorted(windows) == list(range(7))
    assert len(sizes) == 1  # a pipeline or a reduction would wait for the missing ones


def test_the_order_is_that_of_seed_and_consumed_samples_alone(prefix: Path) -> None:
    """Neither the length of the run nor where it went on matters; every epoch shows everything."""
    steps = 13
    whole = stream(packed(prefix, steps=2), steps)
    assert stream(packed(prefix, steps=500), steps) == whole
    assert stream(packed(prefix), steps - 9, consumed=4 * 9) == whole[9:]
    ids = [i for step in whole for batch in step for i in sample_ids(batch)]
    epoch = max(ids) + 1
    assert epoch < len(ids) / 2 < 2 * epoch
    one, two = ids[:epoch], ids[epoch : 2 * epoch]
    assert sorted(one) == sorted(two) == list(range(epoch))
    assert one != two
    assert stream(packed(prefix, seed=5), 1) != whole[:1]


def failing(after: int) -> Callable[[GPTDataset, int], Sample]:
    original = GPTDataset.__getitem__
    reads: list[int] = []

    def read(self: GPTDataset, index: int) -> Sample:
        reads.append(index)
        if len(reads) > after:
            raise OSError("the disk is gone")
        return original(self, index)

    return read


def error_rank(tree: dict[str, Any], after: int, what: str) -> tuple[int, str, str]:
    """Read until it fails: finished reads, the type of the error, and its text."""
    config = config_from_tree(tree)
    init_from_env(device="cpu")
    mesh = ParallelMesh.create(config.parallel)
    assert mesh is not None
    finished = 0
    with mock.patch.object(GPTDataset, "__getitem__", failing(after)):
        data = ReplicaData(config, mesh)
        batches = data.batches()
        try:
            for _ in range(20):
                if what == "train":
                    next(batches)
                else:
                    data.validation_batches("validation")
                finished += 1
        except (ValueError, RuntimeError, OSError) as error:
            return finished, type(error).__name__, str(error)
        finally:
            data.close()
            mesh.close()
    raise AssertionError("nothing failed")


@pytest.mark.parametrize(("what", "finished"), [("train", 2), ("validation", 1)])
def test_an_error_of_the_reader_is_that_of_all_its_ranks(
    ranks: RankPool, prefix: Path, what: str, finished: int
) -> None:
    """Only one rank reads, and none of the others may wait for what it cannot read."""
    tree = config_to_tree(packed(prefix, "tp=2,pp=2"))
    found = ranks.run(error_rank, 4, tree, 11, what, timeout=30)
    assert len(set(found)) == 1
    assert found[0][0] == finished
    assert "the disk is gone" in found[0][2]


@pytest.mark.parametrize("source", ["byte", "null:40", "x.model", "folder"])
def test_every_tokenizer_travels_into_checkpoints(tmp_path: Path, source: str) -> None:
    """A name or a file as well, and as a folder that is read again."""
    trained = train_bpe(["some text, and some more"] * 9, vocab_size=275)
    trained.save(tmp_path / "folder")
    (tmp_path / "x.model").write_bytes((tmp_path / "folder" / "tokenizer.model").read_bytes())
    place = tmp_path / source if (tmp_path / source).exists() else Path(source)
    found = tokenizer_folder(toy(data={"tokenizer": str(place)}))
    for name, content in found.items():
        path = tmp_path / "checkpoint" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    again, known = load_tokenizer(tmp_path / "checkpoint" / "tokenizer"), load_tokenizer(place)
    text = "1 2 3" if source.startswith("null") else "some"
    assert (again.vocab_size, again.encode(text)) == (known.vocab_size, known.encode(text))


def test_a_token_below_zero_is_named() -> None:
    """A vocabulary cut over ranks would take it for one of another rank, and embed nothing."""
    rows = {"tokens": np.array([[1, 2], [3, 4]]), "labels": np.array([[2, 3], [-7, 5]])}
    with pytest.raises(ValueError, match="sample 9 of the data holds token -7: its file is"):
        check_tokens({**rows, "sample_ids": np.array([8, 9])}, 10)


def test_tokens_outside_the_vocabulary_are_an_error_of_all_ranks(
    ranks: RankPool, prefix: Path
) -> None:
    tree = config_to_tree(packed(prefix, "tp=2", model={"vocab_size": 40}))
    found = ranks.run(error_rank, 2, tree, 10**6, "train", timeout=30)
    assert len(set(found)) == 1
    _, kind, text = found[0]
    assert kind == "ValueError"
    assert "vocab_size=40" in text
    assert "\n" not in text
