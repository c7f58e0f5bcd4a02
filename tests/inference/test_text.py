"""Text piece by piece: the same as at once, nothing half shown, and stop strings anywhere."""

from collections.abc import Iterable, Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import ByteTokenizer, Tokenizer, train_sentencepiece
from mcore_inference import TextStream, continuation
from mcore_inference.text import without_cut_character

BYTES = ByteTokenizer()


class Pieces(ByteTokenizer):
    """Ids are places in a list of pieces."""

    def __init__(self, *pieces: str) -> None:
        super().__init__()
        object.__setattr__(self, "pieces", pieces)

    def decode(self, ids: Iterable[int]) -> str:
        pieces: tuple[str, ...] = self.pieces  # type: ignore[attr-defined]
        return "".join(pieces[i] for i in ids)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = [f"the {a} cats of {a}n — ďáblovy kočky 🐈 {a}" for a in ("one", "two", "three") * 20]
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_sentencepiece(documents=texts, output=folder, vocab_size=310)


def follow(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    """What may be shown after each token, and at the end; checks what holds at every moment."""
    shown, texts = 0, []
    for token in tokens:
        stream.append(token)
        assert stream.visible >= shown
        shown = stream.visible
        texts.append(stream.text)
        assert len(stream.text) == shown
    stream.close()
    texts.append(stream.text)
    assert all(texts[-1].startswith(text) for text in texts)
    return texts


CHARACTERS = st.text(alphabet="ab \n.ďř€—🐈\u0301", max_size=12).map(lambda text: text.encode())
BROKEN = st.binary(max_size=5)
STREAMS = st.lists(st.one_of(CHARACTERS, BROKEN), max_size=12).map(b"".join)


@settings(max_examples=300, deadline=None)
@given(prompt=STREAMS, tokens=STREAMS, end=st.booleans())
def test_pieces_make_up_the_text_at_once(prompt: bytes, tokens: bytes, end: bool) -> None:
    """Characters of all lengths, broken bytes, prompts that end within a character."""
    ids = [*tokens, *([256] * 3 if end else [])]
    stream = TextStream(BYTES, list(prompt))
    texts = follow(stream, ids)
    whole = continuation(BYTES, list(prompt), ids)
    assert texts[-1] == without_cut_character(whole)
    assert len(stream.ends) == len(ids)
    assert stream.ends == sorted(stream.ends)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_of_a_trained_vocabulary_make_up_the_text_at_once(
    trained: Tokenizer, data: st.DataObject
) -> None:
    """Words with leading blanks, characters from bytes, control tokens in between."""
    token = st.integers(0, trained.vocab_size - 1)
    text = st.text(alphabet="the catsofnáď🐈— x", max_size=10).map(trained.encode)
    ids = st.lists(st.one_of(text, token.map(lambda t: [t])), max_size=10)
    prompt, tokens = (list(chain.from_iterable(data.draw(ids))) for _ in range(2))
    texts = follow(TextStream(trained, prompt), tokens)
    assert texts[-1] == without_cut_character(continuation(trained, prompt, tokens))


@pytest.mark.parametrize("filler", [0xFF, 256, 0xE2])
def test_long_stretches_without_text_stay_cheap_and_right(filler: int) -> None:
    """Bytes that never become a character, and tokens that have no text."""
    decoded: list[int] = []

    class Counting(ByteTokenizer):
        def decode(self, ids: Iterable[int]) -> str:
            ids = list(ids)
            decoded.append(len(ids))
            return super().decode(ids)

    tokens = [*b"ab", *[filler] * 300, *"c€".encode()]
    stream = TextStream(Counting(), list(b"x "))
    texts = follow(stream, tokens)
    assert max(decoded) < 60
    assert texts[-1] == BYTES.decode(tokens)
    assert texts[1] == "ab"
    if filler != 256:  # what cannot be the beginning of a character is shown at once
        assert len(texts[150]) > 140


def test_a_character_shows_when_its_bytes_are_complete() -> None:
    """U54: bytes of a character are never shown as replacement characters."""
    for text in ("ď", "€", "🐈"):
        texts = follow(TextStream(BYTES, list(b"a")), list(text.encode()))
        assert texts == [""] * (len(text.encode()) - 1) + [text, text]
    assert follow(TextStream(BYTES, list(b"a")), [*b"x", 0xC4])[-1] == "x"  # cut off
    assert follow(TextStream(BYTES, [*b"a", 0xC4]), [0x8F]) == ["ď", "ď"]  # begun by the prompt
    assert follow(TextStream(BYTES, []), [0xC4, *b"x"]) == ["", "\ufffdx", "\ufffdx"]  # broken


def test_a_stop_string_over_several_tokens_is_never_shown() -> None:
    """U52: DEF, G, HI, J with stop DEFGHIJ give nothing; with K in place of J all seven."""
    tokenizer = Pieces("DEF", "G", "HI", "J", "K")
    stream = TextStream(tokenizer, [], ["DEFGHIJ"])
    assert follow(stream, [0, 1, 2, 3, 4]) == [""] * 6
    assert stream.stopped
    twin = TextStream(tokenizer, [], ["DEFGHIJ"])
    assert follow(twin, [0, 1, 2, 4]) == ["", "", "", "DEFGHIK", "DEFGHIK"]
    assert not twin.stopped
    held = TextStream(tokenizer, [], ["DEFGHIJ"])
    assert follow(held, [0, 1, 2]) == ["", "", "", "DEFGHI"]


TEXTS = st.text(alphabet="abď", max_size=14)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(TEXTS, min_size=1, max_size=8),
    stop=st.lists(st.text(alphabet="abď", min_size=1, max_size=5), min_size=1, max_size=3),
    prompt=TEXTS,
)
def test_stop_strings_end_the_text_where_a_search_would(
    pieces: list[str], stop: list[str], prompt: str
) -> None:
    """Over any borders of tokens; what is held back is what may become a stop string, no more."""
    tokenizer = Pieces(prompt, *pieces)
    stream = TextStream(tokenizer, [0], stop)
    texts = follow(stream, range(1, len(pieces) + 1))
    taken = ""
    for piece, text in zip(pieces, texts, strict=False):
        taken += piece
        places = [taken.find(one) for one in stop if one in taken]
        if places:
            assert text == texts[-1] == taken[: min(places)]
            assert stream.stopped
            return
        begun = [taken[i:] for i in range(len(taken)) if any(s.startswith(taken[i:]) for s in stop)]
        assert text == taken.removesuffix(begun[0] if begun else "")
    assert not stream.stopped
    assert texts[-1] == taken


def test_the_prompt_holds_no_stop_string() -> None:
    stream = TextStream(Pieces("ab", "c", "abc"), [0], ["bc", "abc"])
    assert follow(stream, [1, 2]) == ["c", "c", "c"]
    assert stream.stopped


def test_ends_say_where_each_token_ends_in_the_text() -> None:
    stream = TextStream(BYTES, [])
    follow(stream, [*"aď".encode(), 256, *b"b"])
    assert stream.ends == [1, 1, 2, 2, 3]
