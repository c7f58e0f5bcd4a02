"""The training, validation and test samples of a run, from one blend or from one for each part."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self

from mcore_data.datasets.blend import (
    Blend,
    BlendedDataset,
    BlendPlan,
    plan_counts,
    plan_once,
    plan_weights,
)
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.datasets.gpt_index import num_epoch_samples
from mcore_data.datasets.sample import SampleSource
from mcore_data.datasets.splits import document_ranges, parse_split
from mcore_data.indexed import IndexedReader

Unit = Literal["sequences", "documents"]
_PARTS: Final = ("train", "validation", "test")
_OTHER_NAMES: Final = {"training": "train", "valid": "validation"}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The datasets of a run; a part that was not asked for or has no documents is None or absent.

    Attributes:
        train: training samples.
        validation: validation samples by the name of the set.
        test: test samples.

    """

    train: SampleSource | None
    validation: Mapping[str, SampleSource]
    test: SampleSource | None


@dataclass(frozen=True, kw_only=True)
class SourcePlan:
    """What a part of the data takes from one file.

    Attributes:
        part: `train`, `validation` (or `validation/NAME`) or `test`.
        prefix: the file.
        documents: documents of the file that fall to the part.
        tokens: their tokens.
        samples: samples drawn from them.
        epochs: how often the tokens are read for those samples.

    """

    part: str
    prefix: str
    documents: int
    tokens: int
    samples: int
    epochs: float


@dataclass(frozen=True, kw_only=True)
class _Part:
    name: str
    blend: Blend
    cut: int | None  # which of the three ranges of documents; None: all documents
    num_samples: int | None

    @property
    def single(self) -> bool:
        """Whether the part is the dataset of its one file.

        Megatron-LM blends one file that is cut by a split and has a weight (its dataset is then a
        little longer than asked for), and does not blend it when the part has files of its own.
        """
        weighted = self.blend.weights is not None and self.cut is not None
        return len(self.blend.prefixes) == 1 and self.blend.counts is None and not weighted

    @property
    def takes_epochs(self) -> bool:
        """Whether every file is read for exactly one epoch."""
        if self.single:
            return self.num_samples is None
        return self.blend.weights is None and self.blend.counts is None


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Which files the parts of the data come from.

    Attributes:
        train: files of the training samples; with a `split`, of all parts.
        validation: files of each validation set, by its name.
        test: files of the test samples.
        split: weights that cut the documents of every file of `train` into the three parts, as in
            `parse_split`; None: each part has files of its own.
        each_validation: make every validation file a set of its own, named after it.

    Raises:
        ValueError: no part has files, or a split comes together with files of validation or test.

    """

    train: Blend | None = None
    validation: Mapping[str, Blend] = field(default_factory=dict)
    test: Blend | None = None
    split: str | None = None
    each_validation: bool = False

    def __post_init__(self) -> None:
        if self.split is None:
            if self.train is None and not self.validation and self.test is None:
                raise ValueError("a corpus needs files for one of its parts")
            return
        parse_split(self.split)
        if self.train is None or self.validation or self.test:
            raise ValueError(
                f"split {self.split!r} cuts the files of train into three parts: give those, and "
                "none for validation and test"
            )
        if self.train.counts is not None:
            raise ValueError(
                "counts of a blend are samples of one part: give weights to cut it by a split, or "
                "a blend for each part"
            )

    @classmethod
    def read(cls, path: str | Path, *, each_validation: bool = False) -> Self:
        """Read a JSON file with a blend for each part.

        Its keys are `train`, `validation` (or `valid`) and `test`. A blend is a text or list as
        `Blend.parse` reads them, or an object `{"files": [...], "counts": [...]}`. For validation
        an object of blends by name makes several sets. ValueError names file and key.
        """
        where = Path(path)
        try:
            value = json.loads(where.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: no JSON ({error})") from None
        if not isinstance(value, dict):
            raise ValueError(f"{where}: it holds no JSON object")
        parts: dict[str, Any] = {}
        for key, entry in value.items():
            name = _OTHER_NAMES.get(key, key)
            if name not in _PARTS or name in parts:
                raise ValueError(f"{where}: key {key!r}; there are train, validation and test")
            if entry is None or entry == []:
                continue
            if name == "validation":
                several = isinstance(entry, dict) and "files" not in entry
                sets = entry if several else {"validation": entry}
                parts[name] = {
                    set_name: _read_blend(item, f"{where}: {key}.{set_name}")
                    for set_name, item in sets.items()
                }
            else:
                parts[name] = _read_blend(entry, f"{where}: {key}")
        try:
            return cls(**parts, each_validation=each_validation)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def validation_sets(self) -> dict[str, Blend]:
        """Return the files of every validation set by its name; with a split those of `train`."""
        sets = dict(self.validation)
        if self.split is not None:
            assert self.train is not None
            sets = {"validation": self.train}
        if not self.each_validation:
            return sets
        return {
            short if name == "validation" else f"{name}/{short}": Blend(prefixes=(file,))
            for name, blend in sets.items()
            for file, short in zip(blend.prefixes, blend.names(), strict=True)
        }

    def build(
        self,
        *,
        train: int | None = None,
        validation: int | None = None,
        test: int | None = None,
        seq_length: int,
        seed: int = 1234,
        cache_dir: str | Path | None = None,
        dataset: Callable[..., SampleSource] = GPTDataset,
        by: Unit = "sequences",
        **options: Any,
    ) -> Parts:
        """Open the files and return the datasets; sample order is that of Megatron-LM.

        Args:
            train, validation, test: least number of samples of the part (validation: of each
                set); 0: leave it out; None: every sample once, which a blend by weights cannot do.
            seq_length: tokens of a sample.
            seed: seed of every shuffle.
            cache_dir: where index arrays are kept, see `GPTDataset`.
            dataset: what makes the samples of one file; called as `GPTDataset` is.
            by: what a split cuts between and `dataset` counts: sequences, or documents of several
                (for `BERTDataset` and `T5Dataset`).
            options: further arguments of `dataset`.

        Raises:
            ValueError: a number is negative or seq_length 0, a file cannot be read or has no
                document for a part that draws on it, or a blend by weights no number of samples.

        """

        def open_source(reader: IndexedReader, documents: range, count: int | None) -> SampleSource:
            return dataset(
                reader,
                documents,
                seq_length=seq_length,
                num_samples=count,
                seed=seed,
                cache_dir=cache_dir,
                **options,
            )

        _check_sizes(seq_length, train=train, validation=validation, test=test)
        made: dict[str, dict[str, SampleSource]] = {name: {} for name in _PARTS}
        readers: dict[str, IndexedReader] = {}
        for part in self._parts(train, validation, test):
            ranges = _ranges(part, self.split, readers, by)
            source = _build_part(part, ranges, readers, open_source, cache_dir)
            if source is not None:
                kind, _, name = part.name.partition("/")
                made[kind][name or kind] = source
        return Parts(
            train=made["train"].get("train"),
            validation=made["validation"],
            test=made["test"].get("test"),
        )

    def plan(
        self,
        *,
        train: int | None = None,
        validation: int | None = None,
        test: int | None = None,
        seq_length: int,
    ) -> list[SourcePlan]:
        """Return what each part takes from each file, without building a dataset.

        Arguments and errors as for `build`.
        """
        _check_sizes(seq_length, train=train, validation=validation, test=test)
        rows = []
        readers: dict[str, IndexedReader] = {}
        for part in self._parts(train, validation, test):
            ranges = _ranges(part, self.split, readers)
            if not any(ranges):
                continue
            tokens = [
                int(readers[p].lengths[r.start : r.stop].sum(dtype="int64"))
                for p, r in zip(part.blend.prefixes, ranges, strict=True)
            ]
            per_epoch = [num_epoch_samples(count, seq_length) for count in tokens]
            for k, prefix in enumerate(part.blend.prefixes):
                if ranges[k] and not per_epoch[k] and part.takes_epochs:
                    raise ValueError(
                        f"{prefix}: {len(ranges[k])} documents of {part.name} with {tokens[k]} "
                        f"tokens hold no sample of seq_length {seq_length}, which takes "
                        f"{seq_length + 1}"
                    )
            if part.single:
                drawn = [per_epoch[0] if part.num_samples is None else part.num_samples]
            else:
                drawn = (
                    _plan(part, ranges, per_epoch.__getitem__).index.counts(len(tokens)).tolist()
                )
            for k, prefix in enumerate(part.blend.prefixes):
                rows.append(
                    SourcePlan(
                        part=part.name,
                        prefix=prefix,
                        documents=len(ranges[k]),
                        tokens=tokens[k],
                        samples=drawn[k],
                        epochs=drawn[k] * seq_length / tokens[k] if tokens[k] else 0.0,
                    )
                )
        if readers and not rows:
            raise ValueError(f"{', '.join(readers)}: no document in any part")
        return rows

    def _parts(
        self, train: int | None, validation: int | None, test: int | None
    ) -> Iterator[_Part]:
        cuts: tuple[int | None, ...] = (None, None, None) if self.split is None else (0, 1, 2)
        wanted: list[tuple[str, Blend | None, int | None, int | None]] = [
            ("train", self.train, cuts[0], train)
        ]
        for name, files in self.validation_sets().items():
            label = name if name == "validation" else f"validation/{name}"
            wanted.append((label, files, cuts[1], validation))
        test_files = self.test if self.split is None else self.train
        wanted.append(("test", test_files, cuts[2], test))
        for name, blend, cut, num_samples in wanted:
            if blend is not None and num_samples != 0:
                yield _Part(name=name, blend=blend, cut=cut, num_samples=num_samples)


def _read_blend(entry: Any, where: str) -> Blend:
    try:
        return Blend.from_json(entry)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _check_sizes(seq_length: int, **counts: int | None) -> None:
    if seq_length < 1:
        raise ValueError(f"seq_length={seq_length} must be at least 1")
    for name, count in counts.items():
        if count is not None and count < 0:
            raise ValueError(f"{name}={count} samples: give 0 to leave the part out, or more")


def _ranges(
    part: _Part, split: str | None, readers: dict[str, IndexedReader], by: Unit = "sequences"
) -> list[range]:
    """Open the files of a part and return which of their sequences or documents belong to it."""
    ranges = []
    for prefix in part.blend.prefixes:
        if prefix not in readers:
            readers[prefix] = IndexedReader(prefix)
        reader = readers[prefix]
        count = len(reader) if by == "sequences" else reader.num_documents
        if part.cut is None or split is None:
            ranges.append(range(count))
        else:
            ranges.append(document_ranges(split, count)[part.cut])
    return ranges


def _plan(
    part: _Part,
    ranges: list[range],
    length: Callable[[int], int],
    cache_dir: str | Path | None = None,
) -> BlendPlan:
    """Plan a blend of several files; `length(k)` are the samples of one epoch of file k."""
    blend = part.blend
    if blend.counts is not None:
        if part.num_samples is not None and part.num_samples > sum(blend.counts):
            raise ValueError(
                f"{part.name}: {part.num_samples} samples asked for, the counts of its blend sum "
                f"to {sum(blend.counts)}"
            )
        plan = plan_counts(blend.counts, cache_dir)
    elif blend.weights is not None:
        if part.num_samples is None:
            raise ValueError(
                f"{part.name}: a blend by weights needs a number of samples; without weights it "
                "takes every sample once"
            )
        plan = plan_weights(blend.weights, part.num_samples, cache_dir)
    else:
        lengths = [length(k) if documents else 0 for k, documents in enumerate(ranges)]
        return plan_once(lengths, part.num_samples, cache_dir)
    for prefix, documents, needed in zip(blend.prefixes, ranges, plan.needed, strict=True):
        if needed and not documents:
            raise ValueError(
                f"{part.name}: {needed} samples of {prefix}, which has no document for this part; "
                "give it another split, or weight 0"
            )
    return plan


def _build_part(
    part: _Part,
    ranges: list[range],
    readers: dict[str, IndexedReader],
    open_source: Callable[[IndexedReader, range, int | None], SampleSource],
    cache_dir: str | Path | None,
) -> SampleSource | None:
    if not any(ranges):
        return None
    prefixes = part.blend.prefixes

    def source(k: int, count: int | None) -> SampleSource:
        return open_source(readers[prefixes[k]], ranges[k], count)

    if part.single:
        return source(0, part.num_samples)
    opened: dict[int, SampleSource] = {}
    if part.blend.weights is None and part.blend.counts is None:
        opened = {k: source(k, None) for k, documents in enumerate(ranges) if documents}
    plan = _plan(part, ranges, lambda k: len(opened[k]), cache_dir)
    for k, needed in enumerate(plan.needed):
        if needed and k not in opened:
            opened[k] = source(k, needed)
    return BlendedDataset([opened.get(k) for k in range(len(prefixes))], plan.index)
