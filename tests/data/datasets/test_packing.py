import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import DocumentDataset, IndexedReader, IndexedWriter, PackedDataset
from mcore_data.datasets import first_fit_decreasing, segment_positions


def write(prefix, documents, modes=None):
    """`documents`: lists of sequences; `modes`: the mode of each."""
    with IndexedWriter(prefix, "uint16", multimodal=modes is not None) as writer:
        for number, document in enumerate(documents):
            flat = np.array([token for part in document for token in part], np.int64)
            lengths = [len(part) for part in document]
            writer.add_document(flat, lengths, None if modes is None else modes[number])
    return IndexedReader(prefix)


def slow_first_fit(lengths, capacity):
    bins, room = [], []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((k for k, free in enumerate(room) if free >= lengths[item]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(item)
        room[place] -= lengths[item]
    return bins


@given(lengths=st.lists(st.integers(1, 20), max_size=60), more=st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_first_fit_decreasing(lengths, more):
    capacity = max(lengths, default=1) + more
    assert first_fit_decreasing(lengths, capacity) == slow_first_fit(lengths, capacity)


def test_many_items_are_packed_at_once():
    lengths = np.random.default_rng(0).integers(10, 4000, 20_000)
    bins = first_fit_decreasing(lengths, 4096)
    assert sorted(i for items in bins for i in items) == list(range(20_000))
    filled = np.array([lengths[items].sum() for items in bins])
    assert filled.max() <= 4096
    assert filled.sum() > 0.98 * 4096 * len(bins)


def test_bad_lengths():
    for lengths in ([5], [0]):
        with pytest.raises(ValueError, match=f"lengths {lengths[0]} to .* capacity 4"):
            first_fit_decreasing(lengths, 4)


@given(
    documents=st.lists(
        st.lists(
            st.tuples(st.lists(st.integers(1, 99), max_size=6), st.integers(0, 1)), max_size=4
        ),
        min_size=1,
        max_size=8,
    ),
    max_length=st.integers(1, 12),
    align=st.sampled_from([1, 2, 4]),
    more=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_packed_samples_hold_every_document_by_itself(
    tmp_path_factory, documents, max_length, align, more
):
    """Tokens, labels, loss and positions of each segment are those of the document alone (U29)."""
    texts = [[t for part, _ in d for t in part] for d in documents]
    masks = [[m for part, m in d for _ in part] for d in documents]
    usable = [i for i, mask in enumerate(masks) if any(mask[1 : max_length + 1]) and len(mask) > 1]
    reader = write(
        tmp_path_factory.mktemp("p") / "c",
        [[part for part, _ in d] for d in documents],
        [[mode for _, mode in d] for d in documents],
    )
    if reader.modes is None:  # no sequence at all
        return
    if not usable:
        with pytest.raises(ValueError, match=r"none of .* documents gives a sample"):
            DocumentDataset(reader, max_length=max_length)
        return
    source = DocumentDataset(reader, max_length=max_length)
    assert source.documents.tolist() == usable
    assert source.lengths.tolist() == [min(len(texts[i]) - 1, max_length) for i in usable]
    assert source.left_out == len(documents) - len(usable)
    assert source.truncated == sum(len(texts[i]) - 1 > max_length for i in usable)
    size = -(-max_length // align) * align + more * align
    packed = PackedDataset(source, seq_length=size, align=align, pad_id=7)
    seen = []
    for index, items in enumerate(packed.bins):
        sample = packed[index]
        bounds = sample.cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == size == len(sample.tokens)
        assert len(bounds) - 1 in (len(items), len(items) + 1)
        assert all(bound % align == 0 for bound in bounds)
        assert sample.positions.tolist() == segment_positions(sample.cu_seqlens).tolist()
        for item, begin in zip(items, bounds, strict=False):
            alone = source[item]
            end = begin + len(alone.tokens)
            for name in ("tokens", "labels", "loss_mask", "positions"):
                np.testing.assert_array_equal(
                    getattr(sample, name)[begin:end], getattr(alone, name)
                )
            text, mask = texts[usable[item]], masks[usable[item]]
            assert alone.tokens.tolist() == text[:-1][:max_length]
            assert alone.labels.tolist() == text[1:][:max_length]
            assert alone.loss_mask.tolist() == mask[1:][:max_length]
            seen.append(item)
        padding = np.ones(size, bool)
        for item, begin in zip(items, bounds, strict=False):
            padding[begin : begin + len(source[item].tokens)] = False
        assert not sample.loss_mask[padding].any()
        assert (sample.tokens[padding] == 7).all()
    assert sorted(seen) == list(range(len(source)))


def test_reported_padding():
    """U29: lengths 5 and 3 are padded to 8 and 4 for two context-parallel ranks, 698 to 700."""

    class Lengths:
        lengths = np.array([5, 3])

        def __len__(self):
            return 2

    assert PackedDataset(Lengths(), seq_length=12, align=4).bins == [[0, 1]]
    for align, padded in ((4, 700), (8, 704)):
        Lengths.lengths = np.array([698])
        PackedDataset(Lengths(), seq_length=padded, align=align)
        with pytest.raises(
            ValueError, match=f"698 positions, with align {align} it takes {padded}"
        ):
            PackedDataset(Lengths(), seq_length=padded - align, align=align)
    with pytest.raises(ValueError, match="align 8 must divide seq_length 700; nearest: 696"):
        PackedDataset(Lengths(), seq_length=700, align=8)


def test_long_documents(tmp_path):
    reader = write(tmp_path / "c", [[[1, 2, 3]], [[4, 5, 6, 7, 8]], [[9]]])
    cut = DocumentDataset(reader, max_length=2)
    assert (cut.lengths.tolist(), cut.truncated, cut.left_out) == ([2, 2], 1, 1)
    assert cut[1].labels.tolist() == [5, 6]
    dropped = DocumentDataset(reader, max_length=2, too_long="drop")
    assert (dropped.documents.tolist(), dropped.left_out) == ([0], 2)
    with pytest.raises(ValueError, match="document 1 has 5 tokens, max_length 2 takes 3"):
        DocumentDataset(reader, max_length=2, too_long="error")
    assert DocumentDataset(reader, [1], max_length=9)[0].loss_mask.tolist() == [1] * 4
    for options, message in (
        ({"max_length": 0}, "max_length 0 must be at least 1"),
        ({"max_length": 2, "too_long": "cut"}, "too_long 'cut' one of"),
        ({"max_length": 2, "documents": [3]}, "documents 3 to 3 asked for, it has 3"),
    ):
        with pytest.raises(ValueError, match=message):
            DocumentDataset(reader, **options)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {index} of 2"):
            cut[index]
