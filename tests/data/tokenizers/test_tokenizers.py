import json
import pickle
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_data import ByteTokenizer, VocabSizes, load_tokenizer, train_sentencepiece
from mcore_data.tokenizers.sentencepiece import SentencePieceTokenizer
from mcore_data.tokenizers.train import sample_texts, train_bpe

CODE = "def f(x):\n\tif x:  # \u00e9\u6f22\U0001f600\r\n        return  [x ]\n\n\n    \n"


@pytest.fixture(scope="module", params=["byte", "sentencepiece"])
def tokenizer(request, sentencepiece_dir):
    return load_tokenizer("byte" if request.param == "byte" else sentencepiece_dir)


@given(text=st.text())
@example(text="")
@example(text=CODE)
@example(text=" ")
@example(text="  leading and trailing \t ")
@example(text="\n\n\r\n\t\x00\x0b\x7f\ufeff\u200b\u2028")
@example(text="\u2581 a\u2581\u2581b \u2581")
@example(text="\u2585 \u2047 \ufffd")
@example(text="<s></s><unk><pad><0x0A><0xE2>")
@example(text="a\u0301 \u00e1 \ufb01 \uff21 \u2460")
@settings(max_examples=150, deadline=None)
def test_every_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text


def test_this_source_tree_comes_back_exactly(tokenizer):
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        text = path.read_text()
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_may_be_none(tokenizer):
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eod_id, tokenizer.pad_id)
    known = {
        ByteTokenizer: (None, 256, 256, None),
        SentencePieceTokenizer: (1, 2, 2, None),
    }
    assert ids == known[type(tokenizer)]
    for special in ids:
        if special is not None:
            assert tokenizer.decode([*tokenizer.encode("a"), special]) == "a"


def test_faults_are_errors(tokenizer):
    with pytest.raises(ValueError, match=r"lone surrogate U\+D83D at character 2 of 3"):
        tokenizer.encode("ab\ud83d")
    for i in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"id {i} lies outside"):
            tokenizer.decode([i])


def test_broken_bytes_become_replacement_characters(tokenizer):
    ids = tokenizer.encode("\U0001f600")
    assert "\ufffd" in tokenizer.decode(ids[:-1])


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "a" / "b")
    config = json.loads((tmp_path / "a" / "b" / "tokenizer_config.json").read_text())
    assert config["kind"] in ("byte", "sentencepiece")
    again = load_tokenizer(tmp_path / "a" / "b")
    copy = pickle.loads(pickle.dumps(tokenizer))
    for other in (again, copy):
        assert other.encode(CODE + "\u2581") == tokenizer.encode(CODE + "\u2581")
        assert other.vocab_size == tokenizer.vocab_size


def test_model_files_give_the_ids_of_the_library(sentencepiece_dir):
    path = sentencepiece_dir / "tokenizer.model"
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = load_tokenizer(path)
    for text in (CODE, "\u2581x \u2581", ""):
        assert ours.encode(text) == library.encode(text)
        assert ours.decode(ours.encode(text)) == library.decode(library.encode(text))


def test_exactness_needs_bytes():
    import io

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world"] * 10),
        model_writer=model,
        vocab_size=15,
        minloglevel=2,
        model_type="bpe",
        pad_id=3,
    )
    plain = SentencePieceTokenizer(model.getvalue())
    assert plain.pad_id == 3
    assert plain.unk_id in plain.encode("\u6f22")
    with pytest.raises(ValueError, match="no pieces for single bytes"):
        SentencePieceTokenizer(model.getvalue(), exact=True)
    with pytest.raises(ValueError, match=r"e: no SentencePiece model \(0 bytes\)"):
        SentencePieceTokenizer(b"", where="e")
    with pytest.raises(ValueError, match="m: no SentencePiece model"):
        SentencePieceTokenizer(b"nonsense", where="m")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer, it has no tokenizer_config.json"),
        ("{", "no JSON"),
        ("[]", 'lacks "format": "mcore-tokenizer"'),
        ('{"tokenizer_class": "LlamaTokenizer"}', 'lacks "format"'),
        ('{"format": "mcore-tokenizer", "version": 9}', "version 9, this reader knows version 1"),
        (
            '{"format": "mcore-tokenizer", "version": 1, "kind": "magic"}',
            "unknown kind 'magic', known are byte, null, sentencepiece, tekken and tiktoken",
        ),
        (
            '{"format": "mcore-tokenizer", "version": 1, "kind": "sentencepiece"}',
            "file is None",
        ),
        (
            '{"format": "mcore-tokenizer", "version": 1, "kind": "sentencepiece", '
            '"file": "../../etc/passwd"}',
            "file is '../../etc/passwd', it must name a file beside",
        ),
        (
            '{"format": "mcore-tokenizer", "version": 1, "kind": "sentencepiece", "file": "m"}',
            "m: no such file, tokenizer_config.json names it",
        ),
    ],
)
def test_bad_directories_are_explained(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_unknown_names_are_explained(tmp_path):
    with pytest.raises(ValueError, match=r"give a directory with tokenizer_config.json"):
        load_tokenizer(tmp_path / "nothing")


def test_vocabulary_sizes_stay_apart():
    byte = ByteTokenizer()
    sizes = VocabSizes.of(byte)
    assert (sizes.tokenizer, sizes.model, sizes.padded) == (257, 257, 384)
    sizes = VocabSizes.of(byte, model=300, multiple=256)
    assert (sizes.tokenizer, sizes.model, sizes.padded) == (257, 300, 512)
    assert VocabSizes.of(byte, model=300, multiple=1).padded == 300
    with pytest.raises(ValueError, match=r"256 rows .* for 257 ids; the least is 257"):
        VocabSizes.of(byte, model=256)


def test_training_is_reproducible_and_sized(tmp_path):
    texts = [path.read_text() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    first, second = (
        train_sentencepiece(
            documents=texts, output=tmp_path / str(i), vocab_size=500, sample_chars=20_000, seed=4
        )
        for i in range(2)
    )
    models = [(tmp_path / str(i) / "tokenizer.model").read_bytes() for i in range(2)]
    assert models[0] == models[1]
    assert first.vocab_size == second.vocab_size == 500
    apart = train_bpe(texts, vocab_size=500, blank_runs=False)
    assert len(apart.encode("        x")) == 9
    assert len(first.encode("        x")) < 9
    assert apart.decode(apart.encode(CODE)) == CODE


@pytest.mark.parametrize(
    ("documents", "size", "message"),
    [
        ([], 400, "no text to train a tokenizer on"),
        (["", "\n\n", "\t"], 400, "no text to train a tokenizer on"),
        (["hello world"], 4096, r"vocab_size 4096 is more than the text fills; the most is 2\d\d"),
        (["hello world"], 100, r"vocab_size 100 is too small .*; the least is 26\d"),
    ],
)
def test_training_on_too_little_is_explained(tmp_path, documents, size, message):
    with pytest.raises(ValueError, match=message):
        train_sentencepiece(documents=documents, output=tmp_path / "t", vocab_size=size)
    assert not (tmp_path / "t").exists()


def test_training_survives_hostile_text(tmp_path):
    hostile = [
        "x" * 300_000,
        "\u6f22" * 20_000,
        "a\ud800b",
        "\x00" * 100,
        "\t\u2581\u2585 \u2047",
        "\r\r\r",
        "words and words and more words\n" * 50,
    ]
    tokenizer = train_sentencepiece(documents=hostile, output=tmp_path / "t", vocab_size=300)
    for text in hostile[:2] + hostile[3:]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_samples_are_fair_and_bounded():
    documents = [f"{i:04d}" * 25 for i in range(1000)]
    picked = sample_texts(iter(documents), 10_000, seed=0)
    assert len(picked) == 100
    assert picked == sorted(picked)
    places = [int(text[:4]) for text in picked]
    assert 350 < sum(places) / len(places) < 650
    assert sample_texts(documents, 10**6, seed=0) == documents
    assert picked != sample_texts(documents, 10_000, seed=1)
    # One huge document does not crowd out the rest.
    mixed = sample_texts(["h" * 10**6, *documents], 100_000, seed=0)
    assert sum(len(text) for text in mixed if text[0] == "h") < 10**5
    assert sys.getsizeof(mixed) < 10**5
