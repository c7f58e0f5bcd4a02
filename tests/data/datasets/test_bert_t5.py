import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import (
    BatchSampler,
    BERTDataset,
    Blend,
    Corpus,
    IndexedReader,
    IndexedWriter,
    MaskingConfig,
    MicroBatchLoader,
    SpanConfig,
    T5Dataset,
)
from mcore_data.datasets.bert import _trimmed, choose_words, mask_tokens
from mcore_data.datasets.sentences import SentenceSource, sentence_stretches
from mcore_data.datasets.t5 import corrupt_spans

V, CLS, SEP, MASK, PAD = 1000, 1, 2, 3, 0
FIRST = 10  # ids below are special
CONTINUES = np.arange(V) % 3 == 2
MASKING = MaskingConfig(mask_id=MASK, cls_id=CLS, sep_id=SEP, vocab_size=V, continues=CONTINUES)
SPANS = SpanConfig(sentinel_ids=range(900, 1000), bos_id=PAD, eos_id=SEP)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """30 documents of 1 to 8 sentences; the tokens of a sentence count on from a random one."""
    prefix = tmp_path_factory.mktemp("sentences") / "s"
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(30):
            lengths = rng.integers(1, 12, rng.integers(1, 9))
            writer.add_document(rng.integers(FIRST, 890, lengths.sum()), lengths.tolist())
    return IndexedReader(prefix)


def equal(a, b):
    assert {k: np.asarray(v).tolist() for k, v in vars(a).items()} == {
        k: np.asarray(v).tolist() for k, v in vars(b).items()
    }


def slow_stretches(lengths, bounds, targets, least):
    """The rule, sentence by sentence."""
    rows = []
    for begin, end in itertools.pairwise(bounds):
        first = begin
        while first < end:
            stop, total = first, 0
            while stop < end and (total < targets[first] or stop - first < least):
                total += lengths[stop]
                stop += 1
            if end - stop < least:
                stop = end
            if stop - first >= least and sum(lengths[first:stop]) >= 2:
                rows.append([first, stop, targets[first]])
            first = stop
    return rows


@given(
    documents=st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=8),
    max_tokens=st.integers(2, 20),
    least=st.integers(1, 3),
    short_rate=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=25, deadline=None)
def test_documents_are_cut_into_stretches(documents, max_tokens, least, short_rate):
    lengths = np.array([n for document in documents for n in document], np.int64)
    bounds = np.cumsum([0, *map(len, documents)])
    options = {"max_tokens": max_tokens, "least_sentences": least, "short_rate": short_rate}
    rows = sentence_stretches(lengths, bounds, rng=np.random.default_rng(1), **options)
    draws = np.random.default_rng(1).random((len(lengths), 2))
    short = [2 + int(u * (max_tokens - 1)) for u in draws[:, 1]]
    targets = [s if u < short_rate else max_tokens for u, s in zip(draws[:, 0], short, strict=True)]
    assert rows.tolist() == slow_stretches(lengths.tolist(), bounds.tolist(), targets, least)
    assert all(2 <= target <= max_tokens for target in targets)


def test_every_epoch_shows_the_stretches_of_its_documents(reader, tmp_path, monkeypatch):
    options = {"max_tokens": 20, "least_sentences": 1, "seed": 4}
    documents = range(5, 25)
    whole = SentenceSource(reader, documents, num_samples=150, **options)
    assert len(whole) >= 150 > len(whole) - len(whole.epochs[-1])
    sentences = range(*reader.document_indices[[5, 25]].tolist())
    start = 0
    for rows in whole.epochs:
        seen = [whole.stretch(i) for i in range(start, start + len(rows))]
        assert sorted(seen) == [tuple(row) for row in rows.tolist()]
        assert seen != sorted(seen)
        left_out = set(sentences) - {s for first, stop, _ in seen for s in range(first, stop)}
        assert all(reader.lengths[s] < 2 for s in left_out)  # and alone at the end
        start += len(rows)
    assert whole.epochs[0].tolist() != whole.epochs[1].tolist()
    cached = [
        SentenceSource(reader, documents, num_samples=150, cache_dir=tmp_path, **options)
        for _ in range(2)
    ]
    monkeypatch.setattr("mcore_data.datasets.sentences._DOCUMENTS", 3)
    blocks = SentenceSource(reader, documents, num_samples=150, **options)
    for other in (*cached, blocks):
        assert [row.tolist() for row in other.epochs] == [row.tolist() for row in whole.epochs]
    with pytest.raises(IndexError, match=f"sample {len(whole)} of"):
        whole.stretch(len(whole))


@given(
    words=st.lists(st.integers(1, 4), min_size=1, max_size=30),
    rate=st.floats(0.05, 0.6),
    max_words=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_whole_words_are_chosen(words, rate, max_words, seed):
    """A word is masked as a whole or not at all, and about as many tokens as the rate says."""
    text = np.concatenate([[CLS], *([12] + [14] * (n - 1) for n in words), [SEP]])
    config = MaskingConfig(
        mask_id=MASK,
        cls_id=CLS,
        sep_id=SEP,
        vocab_size=V,
        continues=CONTINUES,
        rate=rate,
        max_words=max_words,
    )
    chosen = set(choose_words(text, config, np.random.default_rng(seed)).tolist())
    place, whole = 1, []
    for size in words:
        inside = {place + i for i in range(size)}
        assert inside <= chosen or not inside & chosen
        whole.append(inside <= chosen)
        place += size
    assert chosen <= set(range(1, len(text) - 1))
    wanted = max(1, round(len(text) * rate))
    assert len(chosen) <= max(wanted, min(words))
    left = [size for size, taken in zip(words, whole, strict=True) if not taken]
    assert not left or len(chosen) + min(left) > wanted  # no other word would have fitted


def test_masks_random_tokens_and_tokens_as_they_were():
    """8, 1 and 1 of 10, each within four standard deviations; other places are left alone."""
    rng = np.random.default_rng(0)
    text = rng.integers(FIRST, V, 20_000)
    chosen = np.arange(0, 20_000, 2)
    masked = mask_tokens(text, chosen, MASKING, rng)
    assert masked[1::2].tolist() == text[1::2].tolist()
    shown, before = masked[chosen], text[chosen]
    shares = (shown == MASK).mean(), (shown == before).mean()
    for share, expected in zip(shares, (0.8, 0.1), strict=True):
        assert abs(share - expected) < 4 * (expected * (1 - expected) / 10_000) ** 0.5
    random = shown[(shown != MASK) & (shown != before)]
    assert random.min() < 20
    assert random.max() > V - 20


@pytest.mark.parametrize("pairs", ["order", "next", "none"])
def test_bert_samples(reader, pairs):
    """Text, types and labels are those of the file; a sample is a function of seed and number."""
    dataset = BERTDataset(reader, seq_length=32, masking=MASKING, pairs=pairs, num_samples=60)
    again = BERTDataset(reader, seq_length=32, masking=MASKING, pairs=pairs, num_samples=60)
    other = BERTDataset(reader, seq_length=32, masking=MASKING, pairs=pairs, seed=7)
    labels = Counter()
    for i in reversed(range(len(dataset))):
        sample = dataset[i]
        equal(sample, again[i])
        first, stop, most = dataset.source.stretch(i)
        count = int(sample.cu_seqlens[1])
        text = sample.labels[:count].tolist()
        assert sample.tokens[count:].tolist() == [PAD] * (32 - count)
        assert text[0] == CLS
        assert text[-1] == SEP
        ends = [place for place, token in enumerate(text) if token == SEP]
        assert len(ends) == (1 if pairs == "none" else 2)
        assert sample.token_types.tolist() == [0] * (ends[0] + 1) + [1] * (count - ends[0] - 1) + [
            0
        ] * (32 - count)
        a, b = text[1 : ends[0]], text[ends[0] + 1 : -1]
        assert len(a) + len(b) <= most
        there = dataset.source.text(first, stop).tolist()
        labels[sample.pair_label] += 1
        if sample.pair_label == 1:
            a, b = (b, a) if pairs == "order" else (a, [])
        if sum(map(len, (a, b))) == len(there):
            assert a + b == there
        places = [n for n in range(len(there)) if there[n : n + len(a)] == a]
        assert places or not a
        changed = sample.tokens != sample.labels
        assert not changed[sample.loss_mask == 0].any()
        assert sample.loss_mask.sum() >= 1
        assert not sample.loss_mask[count:].any()
    if pairs == "none":
        assert set(labels) == {-1}
    else:
        assert abs(labels[1] / len(dataset) - 0.5) < 0.25
    assert any(other[i].labels.tolist() != dataset[i].labels.tolist() for i in range(5))


@given(sizes=st.tuples(st.integers(1, 30), st.integers(1, 30)), most=st.integers(2, 40))
@settings(max_examples=50, deadline=None)
def test_the_longer_segment_is_trimmed(sizes, most):
    a, b = np.arange(sizes[0]), np.arange(100, 100 + sizes[1])
    kept = _trimmed(a, b, most, np.random.default_rng(sum(sizes)))
    assert sum(map(len, kept)) == min(sum(sizes), most)
    for part, whole in zip(kept, (a, b), strict=True):
        assert part.tolist() == whole.tolist()[part[0] - whole[0] :][: len(part)]
    lost = [n - len(part) for n, part in zip(sizes, kept, strict=True)]
    if all(lost):
        assert abs(len(kept[0]) - len(kept[1])) <= 1


@given(
    size=st.integers(2, 200),
    rate=st.floats(0.05, 0.9),
    mean=st.floats(1, 8),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_spans_are_left_out_and_written(size, rate, mean, seed):
    """Encoder and labels together are the text; their lengths depend on its length alone."""
    config = SpanConfig(
        sentinel_ids=range(1000, 1200), bos_id=0, eos_id=1, rate=rate, mean_length=mean
    )
    text = np.arange(2, size + 2)
    seen, written = corrupt_spans(text, config, np.random.default_rng(seed))
    assert (len(seen), len(written)) == config.sizes(size)
    noise, spans = config.counts(size)
    assert seen[-1] == written[-1] == 1
    spans_written = {}
    for token in written[:-1].tolist():
        if token >= 1000:
            spans_written[mark := token] = []
        else:
            spans_written[mark].append(token)
    assert list(spans_written) == list(range(1000, 1000 + spans))
    restored = [t for token in seen[:-1].tolist() for t in spans_written.get(token, [token])]
    assert restored == text.tolist()
    assert all(spans_written.values())
    assert sum(map(len, spans_written.values())) == noise
    s, t = config.sizes(size)
    longest = config.longest(max(s, 3), max(t, 3))
    for length in range(2, longest + 1):
        assert config.sizes(length)[0] <= max(s, 3)
        assert config.sizes(length)[1] <= max(t, 3)


def test_t5_samples(reader):
    dataset = T5Dataset(reader, seq_length=40, target_length=16, spans=SPANS, num_samples=30)
    again = T5Dataset(reader, seq_length=40, target_length=16, spans=SPANS, num_samples=30)
    for i in range(len(dataset)):
        sample = dataset[i]
        equal(sample, again[i])
        count = int(sample.cu_seqlens[1])
        assert sample.loss_mask.tolist() == [1] * count + [0] * (16 - count)
        assert sample.tokens[0] == PAD
        assert sample.tokens[1:count].tolist() == sample.labels[: count - 1].tolist()
        assert sample.labels[count - 1] == SEP
        seen = sample.encoder_tokens[: sample.encoder_length]
        first, stop, most = dataset.source.stretch(i)
        text = dataset.source.text(first, stop)[:most].tolist()
        both = Counter(seen.tolist()) + Counter(sample.labels[:count].tolist())
        assert both - Counter(text) == Counter(
            {SEP: 2, **{900 + k: 2 for k in range(SPANS.counts(len(text))[1])}}
        )
        assert not sample.encoder_tokens[sample.encoder_length :].any()


def test_a_split_cuts_between_documents(reader):
    """Blends take samples of sentences too: no document lies in two parts."""
    corpus = Corpus(train=Blend(prefixes=(str(reader.prefix),)), split="8,2")
    options = {"dataset": BERTDataset, "by": "documents", "masking": MASKING}
    parts = corpus.build(train=100, validation=None, test=0, seq_length=24, **options)
    owners = []
    for dataset in (parts.train, parts.validation["validation"]):
        source = dataset.source
        firsts = [source.stretch(i)[0] for i in range(len(source))]
        owners.append({source.document_of(first) for first in firsts})
    assert len(parts.train) >= 100
    assert max(owners[0]) < 24 <= min(owners[1])


def test_batches_hold_what_the_samples_hold(reader):
    bert = BERTDataset(reader, seq_length=24, masking=MASKING)
    t5 = T5Dataset(reader, seq_length=24, target_length=12, spans=SPANS)
    found = []
    for dataset in (bert, t5):
        sampler = BatchSampler(len(dataset), 4)
        with MicroBatchLoader(dataset, sampler, dp_rank=1, dp_size=2, micro_batch_size=2) as loader:
            (batch,) = next(loader)
        assert batch["sample_ids"].tolist() == [2, 3]
        assert batch["tokens"][1].tolist() == dataset[3].tokens.tolist()
        found.append(batch)
    assert found[0]["token_types"].shape == (2, 24)
    assert found[0]["pair_label"].tolist() == [bert[2].pair_label, bert[3].pair_label]
    assert found[1]["encoder_tokens"].shape == (2, 24)
    assert found[1]["encoder_length"].tolist() == [t5[2].encoder_length, t5[3].encoder_length]


def test_bad_arguments(reader, tmp_path):
    with IndexedWriter(tmp_path / "one", np.uint16) as writer:
        writer.add_document([20, 21, 22, 23], [2, 2])
        writer.add_document([20], [1])
    one = IndexedReader(tmp_path / "one")
    spans = {"sentinel_ids": [9], "bos_id": 0, "eos_id": 1}
    for call, message in (
        (lambda: BERTDataset(reader, seq_length=4, masking=MASKING), "use 5 or more"),
        (lambda: BERTDataset(reader, seq_length=9, masking=MASKING, pairs="x"), "pairs is 'x'"),
        (
            lambda: BERTDataset(one, seq_length=9, masking=MASKING, pairs="next"),
            "pairs='next' takes samples of two documents",
        ),
        (lambda: BERTDataset(one, [1], seq_length=9, masking=MASKING), "none of 1 documents holds"),
        (lambda: BERTDataset(one, [2], seq_length=9, masking=MASKING), "documents 2 to 2 asked"),
        (
            lambda: BERTDataset(one, seq_length=9, masking=MASKING, num_samples=0),
            "num_samples is 0",
        ),
        (lambda: BERTDataset(one, seq_length=9, masking=MASKING, short_rate=2), "short_rate is 2"),
        (lambda: MaskingConfig(mask_id=9, cls_id=1, sep_id=2, vocab_size=9), "mask_id 9 lies"),
        (
            lambda: MaskingConfig(mask_id=3, cls_id=1, sep_id=2, vocab_size=9, rate=0),
            "rate is 0",
        ),
        (
            lambda: MaskingConfig(
                mask_id=3, cls_id=1, sep_id=2, vocab_size=9, continues=np.zeros(8, bool)
            ),
            "continues has 8 entries, the vocabulary 9",
        ),
        (lambda: SpanConfig(**spans, rate=1.0), "rate 1.0 must lie"),
        (lambda: SpanConfig(**{**spans, "sentinel_ids": [9, 9]}), r"sentinel_ids \[9, 9\]"),
        (lambda: SpanConfig(**spans).longest(2, 9), "2 positions of the encoder and 9 of the"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert SpanConfig(**spans).longest(1000, 1000) == 30  # more would take a second sentinel
