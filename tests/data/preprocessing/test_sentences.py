"""Documents cut into sentences: a sequence each."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_data import ByteTokenizer, IndexedReader, preprocess, split_sentences
from mcore_data.cli import main

BYTE = ByteTokenizer()
PARTS = st.lists(
    st.sampled_from(
        [*".!?\u3002\uff01 \n\"')", "...", "Dr.", "e.g.", "I", "A.", "word", "Word", "\t"]
    )
)


@given(text=st.one_of(st.text(), PARTS.map("".join)))
@example(text="")
@example(text="\n\n\n")
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_and_cutting_again_changes_nothing_much(text):
    parts = split_sentences(text)
    assert "".join(parts) == text
    assert all(parts)


@pytest.mark.parametrize(
    "sentences",
    [
        ["One. ", "Two! ", "Three? ", "Four"],
        ["He said \u201cno.\u201d ", "Then (quietly.) ", "She left."],
        [
            "Dr. Smith met Mrs. Jones at 5 p.m. on St. Mary's Rd., i.e. there. ",
            "Then J. R. Ewing came.",
        ],
        ["Is it 3.14 or v1.2.3? ", "See fig. 3 and eq. 4 vs. 5. ", "So did I. ", "Yes."],
        ["Wait... what? ", "Wait... ", "What?!\n", "\u00c9tait-ce vrai ? ", "Oui."],
        ["A heading without a stop\n\n", "A paragraph\nof two lines. ", "Its end."],
        [
            "\u5929\u6c14\u597d\u3002",
            "\u4f60\u597d\u5417\uff1f",
            "\u300c\u597d\u3002\u300d",
            "\u518d\u89c1",
        ],
        ["\u092f\u0939 \u0939\u0948\u0964 ", "\u0935\u0939 \u0939\u0948\u0964"],
    ],
)
def test_where_sentences_end(sentences):
    assert split_sentences("".join(sentences)) == sentences


@pytest.mark.parametrize("run", [" ", ".", "\u0964", "\t ", "\n" + 9_000 * " "])
def test_time_grows_with_the_text_alone(run):
    """Runs that end no sentence: dot leaders, padded tables."""
    text = "a" + (run * 30_000)[:30_000].rstrip("\n") + "b"
    begin = time.process_time()
    assert split_sentences(text)[0].startswith(text[:9])
    assert time.process_time() - begin < 1


def test_each_is_a_sequence(tmp_path):
    """U08: the EOD belongs to the last sentence; documents are what they were."""
    texts = ["One. Two! Three?", "", "Alone", "\n\n", "A b. C d."]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    whole = preprocess([path], tokenizer=BYTE, output=tmp_path / "w", append_eod=True)
    report = preprocess(
        [path], tokenizer=BYTE, output=tmp_path / "c", append_eod=True, sentences=True
    )
    assert (report.documents, report.tokens) == (whole.documents, whole.tokens) == (4, 36)
    cut, plain = IndexedReader(tmp_path / "c"), IndexedReader(tmp_path / "w")
    cut.verify()
    assert (tmp_path / "c.bin").read_bytes() == (tmp_path / "w.bin").read_bytes()
    assert cut.lengths.tolist() == [5, 5, 7, 6, 3, 5, 5]
    assert cut.document_indices.tolist() == [0, 3, 4, 5, 7]
    assert cut.document(0).tolist() == plain.document(0).tolist()
    command = ["preprocess", str(path), "--tokenizer", "byte", "--output", str(tmp_path / "d")]
    assert main([*command, "--append-eod", "--split-sentences", "--workers", "1"]) == 0
    assert (tmp_path / "c.idx").read_bytes() == (tmp_path / "d.idx").read_bytes()
