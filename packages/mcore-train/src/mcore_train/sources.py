"""What a run's config of data opens: samples, their order, validation sets, the tokenizer.

Nothing here knows of ranks: every rank opens the same, and `data.py` shares out what is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mcore_data import (
    BatchSampler,
    Blend,
    BlendedDataset,
    BlendSampler,
    Corpus,
    IndexedReader,
    JoinedDataset,
    SampleSource,
    Tokenizer,
    WeightSchedule,
    document_ranges,
    load_tokenizer,
)
from mcore_train.config import TrainConfig
from mcore_train.data_config import BatchConfig, DataConfig
from mcore_train.families import family_of

SPLIT = "969,30,1"
"""How documents are divided over training, validation and test where nothing says it."""

MOCK_SAMPLES = 1 << 20
_TRAIN, _VALIDATION = 0, 1
_PARTS = ("training", "validation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a reader of samples has.

    Attributes:
        train: training samples.
        sampler: the order in which they are consumed.
        validation: validation samples by the name of the set.
        tokenizer: the tokenizer, if the config names one.

    """

    train: SampleSource
    sampler: BatchSampler | BlendSampler
    validation: Mapping[str, SampleSource]
    tokenizer: Tokenizer | None


def open_datasets(config: TrainConfig) -> Datasets:
    """Open the files that `config.data` names.

    Raises:
        ValueError: a file is missing or damaged, or too short for one sample; weights and files do
            not fit together; or the tokenizer has more tokens than the model.
    """
    data = config.data
    tokenizer = None if data.tokenizer is None else load_tokenizer(data.tokenizer)
    _check_vocabulary(config, tokenizer)
    if data.mock:
        return _mock(config, tokenizer)
    corpus = corpus_of(data)
    files = _Files(config, corpus.split, tokenizer)
    assert corpus.train is not None
    train, sampler = _training(config, corpus.train, files)
    sets = {name: files.validation(blend) for name, blend in corpus.validation_sets().items()}
    _check_evaluation(config, any(source is not None for source in sets.values()))
    return Datasets(
        train=train,
        sampler=sampler,
        validation={name: source for name, source in sets.items() if source is not None},
        tokenizer=tokenizer,
    )


def _mock(config: TrainConfig, tokenizer: Tokenizer | None) -> Datasets:
    family, windows = family_of(config), config.evaluate.windows
    train = family.mock(MOCK_SAMPLES, config, config.seed)
    return Datasets(
        train=train,
        sampler=_shuffled(config, train),
        validation={"validation": family.mock(windows, config, config.seed + 1)},
        tokenizer=tokenizer,
    )


def _shuffled(config: TrainConfig, source: SampleSource) -> BatchSampler:
    batch = config.batch
    return BatchSampler(
        len(source),
        batch.global_size,
        config.seed,
        shuffle=True,
        last=batch.last,
        ramp=batch.growth,
    )


def corpus_of(data: DataConfig) -> Corpus:
    """Return which files the parts of the data come from.

    Raises:
        ValueError: none are named for training, or what names them cannot be read.
    """
    if data.parts is not None:
        corpus = Corpus.read(data.parts, each_validation=data.each_validation)
        if corpus.train is None:
            raise ValueError(f"data.parts={data.parts} names no files for train")
        return corpus
    if data.blend is not None:
        train = Blend.parse(data.blend)
    elif data.train is not None:
        train = Blend(prefixes=(str(data.train),))
    else:
        raise ValueError(
            "data.train is not set: give a prefix of .bin/.idx files, data.blend, data.parts or "
            "data.mock"
        )
    if data.validation is None:
        split = data.split or SPLIT
        return Corpus(train=train, split=split, each_validation=data.each_validation)
    validation = {"validation": Blend(prefixes=(str(data.validation),))}
    return Corpus(train=train, validation=validation)


def check_files(config: TrainConfig) -> None:
    """Check that the files of training and validation are there and belong together.

    Raises:
        ValueError: one line naming the file.
    """
    if config.data.mock:
        return
    corpus = corpus_of(config.data)
    assert corpus.train is not None
    sequences = {}
    sets = corpus.validation_sets().values()
    for blend in (corpus.train, *sets):
        for prefix in blend.prefixes:
            reader = IndexedReader(prefix)
            sequences[prefix] = family_of(config).count(reader)
            reader.close()
    split = corpus.split
    counts = [sequences[prefix] for blend in sets for prefix in blend.prefixes]
    _check_evaluation(
        config,
        any(n if split is None else document_ranges(split, n)[_VALIDATION] for n in counts),
    )
    names = corpus.train.names()
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"the training files name {twice[0]} twice: give it once, with the sum of its weights"
        )
    _schedule(config, corpus.train)


def _check_evaluation(config: TrainConfig, there: bool) -> None:
    """Check that there is something to measure the validation loss on, where it is asked for."""
    evaluate, data = config.evaluate, config.data
    if there or not (evaluate.interval or evaluate.at_start):
        return
    asked = f"interval={evaluate.interval}" if evaluate.interval else "at_start"
    where = f"data.parts={data.parts} names no files for it"
    if data.parts is None:
        where = f"data.split={data.split or SPLIT} leaves no documents for it"
    raise ValueError(f"evaluate.{asked} without validation data: {where}")


def _is_blend(data: DataConfig, blend: Blend) -> bool:
    """Whether weights say what comes next; one file without a weight is read by itself."""
    plain = blend.weights is None and blend.counts is None and data.weights is None
    return len(blend.prefixes) > 1 or not plain


def _schedule(config: TrainConfig, blend: Blend) -> WeightSchedule | None:
    """Return the weights of the training files; None: in proportion to their samples."""
    if config.data.weights is not None:
        if blend.counts is not None:
            raise ValueError(
                f"data.weights={config.data.weights} would set aside the counts of the training "
                "blend: give one of them"
            )
        return WeightSchedule.read(config.data.weights, blend.names())
    if blend.counts is not None:
        wanted, there = config.batch.samples(config.steps), sum(blend.counts)
        if wanted > there:
            raise ValueError(
                f"the counts of the training blend sum to {there} samples, steps={config.steps} x "
                f"batch.global_size={config.batch.global_size} take {wanted}: use steps "
                f"{_steps_of(config.batch, there)} or less"
            )
        return WeightSchedule.constant(blend.counts)
    return None if blend.weights is None else WeightSchedule.constant(blend.weights)


def _training(
    config: TrainConfig, blend: Blend, files: _Files
) -> tuple[SampleSource, BatchSampler | BlendSampler]:
    if not _is_blend(config.data, blend):
        source = files.samples(blend.prefixes[0], _TRAIN)
        return source, _shuffled(config, source)
    if config.batch.last != "join":
        raise ValueError(
            f"batch.last={config.batch.last} is for one file: those of a blend end their epochs at "
            "different samples, use join"
        )
    # Those of weight 0 too: what a run has drawn from them before must still be known.
    sources = [files.samples(prefix, _TRAIN) for prefix in blend.prefixes]
    lengths = dict(zip(blend.names(), map(len, sources), strict=True))
    sampler = BlendSampler(
        lengths,
        _schedule(config, blend) or list(lengths.values()),
        config.batch.global_size,
        config.seed,
        ramp=config.batch.growth,
    )
    return JoinedDataset(sources), sampler


def _steps_of(batch: BatchConfig, samples: int) -> int:
    """The most steps that take at most so many samples."""
    growth = batch.growth
    if growth is None:
        return samples // batch.global_size
    steps = taken = 0
    while (taken := taken + growth.size(taken, batch.global_size)) <= samples:
        steps += 1
    return steps


class _Files:
    """Opens each file once and makes the samples of its parts."""

    def __init__(self, config: TrainConfig, split: str | None, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.split = split
        self.eod_id = end_of_document(config.data, tokenizer)
        self.readers: dict[str, IndexedReader] = {}

    def documents(self, prefix: str, part: int) -> range:
        """Return which sequences of the file belong to the part."""
        if prefix not in self.readers:
            self.readers[prefix] = IndexedReader(prefix)
        count = family_of(self.config).count(self.readers[prefix])
        return range(count) if self.split is None else document_ranges(self.split, count)[part]

    def samples(self, prefix: str, part: int) -> SampleSource:
        """Return one epoch of the samples of a part of the file."""
        documents, config = self.documents(prefix, part), self.config
        try:
            return family_of(config).samples(self.readers[prefix], documents, config, self.eod_id)
        except ValueError as error:
            raise ValueError(f"{_PARTS[part]} data: {error}") from None

    def validation(self, blend: Blend) -> SampleSource | None:
        """Return the samples of a validation set; None where its files have no documents for it.

        Files with weights give as many windows as an evaluation takes, in that proportion; others
        give all that they have.
        """
        part = _VALIDATION
        there = [bool(self.documents(prefix, part)) for prefix in blend.prefixes]
        if not any(there):
            return None
        shares = blend.weights or blend.counts or (1,) * len(there)
        chosen = [
            k for k, (ok, share) in enumerate(zip(there, shares, strict=True)) if ok and share
        ]
        if not chosen:
            raise ValueError(
                f"no file of the blend {list(blend.prefixes)} has validation documents"
            )
        sources = [self.samples(blend.prefixes[k], part) for k in chosen]
        if len(blend.prefixes) == 1:
            return sources[0]
        if blend.weights is not None:
            weights = [blend.weights[k] for k in chosen]
            return BlendedDataset.by_weights(sources, weights, self.config.evaluate.windows)
        counts = None if blend.counts is None else [blend.counts[k] for k in chosen]
        return BlendedDataset.by_counts(sources, counts)


def end_of_document(data: DataConfig, tokenizer: Tokenizer | None) -> int | None:
    """The token that ends a document: the config's, else the tokenizer's."""
    if data.eod_id is not None or tokenizer is None:
        return data.eod_id
    return tokenizer.eod_id


def _check_vocabulary(config: TrainConfig, tokenizer: Tokenizer | None) -> None:
    size = config.model.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > size:
        raise ValueError(
            f"model.vocab_size={size} is smaller than the {tokenizer.vocab_size} tokens of "
            f"{config.data.tokenizer}: use vocab_size {tokenizer.vocab_size} or more"
        )
