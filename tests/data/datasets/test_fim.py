import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import FIMConfig, FIMDataset, GPTDataset, IndexedReader, IndexedWriter
from mcore_data.datasets.fim import fill_in_the_middle

PRE, MID, SUF, EOD = 90, 91, 92, 0
IDS = {"prefix_id": PRE, "middle_id": MID, "suffix_id": SUF}


def restore(tokens):
    """Put a rearranged document together again, and say which form it had."""
    tokens = list(tokens)
    if not tokens or tokens[0] != PRE:
        return tokens, "plain"
    suffix, middle = tokens.index(SUF), tokens.index(MID)
    prefix, tail, rest = tokens[1:suffix], tokens[suffix + 1 : middle], tokens[middle + 1 :]
    if prefix:
        return prefix + rest + tail, "psm"
    return rest + tail, "spm"  # or PSM with an empty prefix: the same tokens


@given(
    size=st.integers(0, 30),
    seed=st.integers(0, 10**6),
    rate=st.sampled_from([0.0, 0.5, 1.0]),
    spm_rate=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost(size, seed, rate, spm_rate):
    tokens = np.arange(1, size + 1)
    config = FIMConfig(**IDS, rate=rate, spm_rate=spm_rate)
    out = fill_in_the_middle(tokens, config, np.random.default_rng(seed))
    restored, form = restore(out)
    assert restored == tokens.tolist()
    if rate == 0:
        assert form == "plain"
    if rate == 1 and size:
        assert len(out) == size + 3
        assert form != "plain"
    if spm_rate == 1:
        assert form != "psm"


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("fim") / "c"
    rng = np.random.default_rng(5)
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(60):
            writer.add_document(np.append(rng.integers(1, 80, rng.integers(3, 30)), EOD))
    return IndexedReader(prefix)


def test_samples_keep_length_documents_and_order(reader):
    options = {"seq_length": 40, "seed": 3, "eod_id": EOD, "reset_attention": True}
    plain = GPTDataset(reader, **options)
    dataset = FIMDataset(reader, fim=FIMConfig(**IDS), fim_seed=7, **options)
    again = FIMDataset(reader, fim=FIMConfig(**IDS), fim_seed=7, **options)
    other = FIMDataset(reader, fim=FIMConfig(**IDS), fim_seed=8, **options)
    forms = []
    for i in range(len(dataset)):
        text, before = dataset.text(i), plain.text(i)
        assert len(text) == len(before) == 41
        assert text.tolist() == again.text(i).tolist()
        ends = np.flatnonzero(text == EOD)
        whole = np.split(text, ends + 1)[:-1]  # the last may be cut
        expected = np.split(before, np.flatnonzero(before == EOD) + 1)
        for ours, theirs in zip(whole, expected, strict=False):
            restored, form = restore(ours[:-1])
            assert restored == theirs[:-1].tolist()
            forms.append(form)
        sample = dataset[i]
        assert sample.tokens.tolist() == text[:-1].tolist()
        assert sample.labels.tolist() == text[1:].tolist()
        assert sample.cu_seqlens[1:-1].tolist() == [end + 1 for end in ends if end < 39]
    assert any(other.text(i).tolist() != dataset.text(i).tolist() for i in range(len(dataset)))
    shares = {form: forms.count(form) / len(forms) for form in ("plain", "psm", "spm")}
    assert 0.3 < shares["plain"] < 0.7
    assert shares["psm"] > 0.1
    assert shares["spm"] > 0.1


def test_bad_config():
    for options, message in (
        ({"rate": 1.5}, "fim rate is 1.5"),
        ({"spm_rate": -1}, "fim spm_rate is -1"),
        ({"middle_id": PRE}, r"fim ids \(90, 90, 92\) must be three different ones"),
    ):
        with pytest.raises(ValueError, match=message):
            FIMConfig(**{**IDS, **options})
