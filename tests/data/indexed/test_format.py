import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_data import build_index, index_header, sequence_offsets, token_dtype
from mcore_data.indexed import DTYPES, parse_header


@pytest.mark.parametrize(
    ("lengths", "dtype", "expected"),
    [
        ([2**29] * 3, "int32", [0, 2147483648, 4294967296]),
        ([2**31 - 1] * 3, "uint16", [0, 4294967294, 8589934588]),
        ([2**30] * 5, "int64", [0, 2**33, 2**34, 3 * 2**33, 2**35]),
    ],
)
def test_offsets_do_not_wrap(lengths, dtype, expected):
    """U09: byte offsets are 64-bit whatever the lengths are counted in."""
    for counts in (np.array(lengths, np.int32), np.array(lengths, np.int64)):
        offsets = sequence_offsets(counts, dtype)
        assert offsets.dtype == np.int64
        assert offsets.tolist() == expected
    index = build_index(np.array(lengths, np.int32), np.arange(len(lengths) + 1), dtype)
    begin = 34 + 4 * len(lengths)
    assert np.frombuffer(index, "<i8", len(lengths), begin).tolist() == expected


def test_bytes_are_the_published_layout():
    index = build_index(np.array([3, 2]), np.array([0, 1, 2]), "uint16")
    assert index == (
        b"MMIDIDX\0\0"
        + (1).to_bytes(8, "little")
        + bytes([8])
        + (2).to_bytes(8, "little")
        + (3).to_bytes(8, "little")
        + b"".join(n.to_bytes(4, "little") for n in (3, 2))
        + b"".join(n.to_bytes(8, "little") for n in (0, 6))
        + b"".join(n.to_bytes(8, "little") for n in (0, 1, 2))
    )
    assert build_index(np.array([3, 2]), np.array([0, 2]), "uint16", np.array([0, 1]))[-2:] == (
        b"\0\1"
    )


@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    sequences=st.integers(0, 2**40),
    documents=st.integers(0, 2**40),
)
def test_header_round_trip(dtype, sequences, documents):
    raw = index_header(dtype=DTYPES[dtype], num_sequences=sequences, num_documents=documents)
    header = parse_header(raw, "x.idx")
    assert (header.dtype, header.num_sequences, header.num_documents) == (
        DTYPES[dtype],
        sequences,
        documents,
    )


def test_offsets_continue_from_a_start():
    lengths = np.random.default_rng(0).integers(0, 1000, 100)
    whole = sequence_offsets(lengths, "int32")
    tail = sequence_offsets(lengths[40:], "int32", start=int(whole[40]))
    np.testing.assert_array_equal(tail, whole[40:])
    assert sequence_offsets(lengths[:0], "int32").tolist() == []


def test_dtypes():
    assert [token_dtype(n).name for n in (1, 65_499, 65_500, 200_000)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]
    with pytest.raises(ValueError, match=r"float16 has no code.*uint16"):
        index_header(dtype="float16", num_sequences=0, num_documents=0)
