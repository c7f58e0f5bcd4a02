"""The text of a completion is what the whole text has more than the prompt."""

from collections.abc import Iterable

from mcore_data import ByteTokenizer
from mcore_inference import Request, SamplingParams, completion, continuation


class Words(ByteTokenizer):
    """Like many SentencePiece models: pieces carry a leading blank, and a text's first is cut."""

    def decode(self, ids: Iterable[int]) -> str:
        return "".join((" the", " cat", "s")[i] for i in ids).removeprefix(" ")


def test_a_piece_at_the_seam_keeps_its_blank() -> None:
    assert continuation(Words(), [0], [1, 2]) == " cats"
    assert continuation(Words(), [0, 1], [2]) == "s"


def test_bytes_of_one_character_are_read_together() -> None:
    tokenizer = ByteTokenizer()
    euro = "€".encode()
    assert continuation(tokenizer, list(b"ab"), list(euro)) == "€"
    # The prompt's tokens end inside the character, and the continuation completes it.
    assert continuation(tokenizer, [*b"ab", euro[0]], list(euro[1:])) == "€"
    # What never becomes a character shows as such, and the prompt's own marks are not repeated.
    assert continuation(tokenizer, [*b"ab", euro[0]], [*b"c"]) == "c"
    assert continuation(tokenizer, list("ab\ufffd".encode()), list(b"c")) == "c"
    assert continuation(tokenizer, list(b"ab"), [euro[0]]) == "\ufffd"
    assert continuation(tokenizer, list(b"ab"), []) == ""


def test_a_character_that_the_end_cuts_off_is_no_text() -> None:
    request = Request(prompt=tuple(b"ab"), params=SamplingParams(max_tokens=2))
    for token in (ord("c"), 0xE2):
        request.append(token, -1.0, 0.0)
    done = completion(ByteTokenizer(), "ab", request)
    assert (done.text, done.token_ids, done.finish_reason) == ("c", (ord("c"), 0xE2), "length")


class Erratic(ByteTokenizer):
    """The text of a prompt changes when something follows it."""

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        return f"{len(ids)}:{ids}"


def test_without_a_common_beginning_the_tokens_speak_for_themselves() -> None:
    assert continuation(Erratic(), [1, 2], [3]) == "1:[3]"


def test_a_completion_has_the_end_token_but_its_text_has_not() -> None:
    request = Request(
        prompt=tuple(b"ab"), params=SamplingParams(stop_token_ids=(ord("!"),), max_tokens=9)
    )
    for token in b"cd!":
        assert request.finish_reason is None
        request.append(token, -float(token), 0.0)
    done = completion(ByteTokenizer(), "ab", request)
    assert (done.prompt, done.text, done.finish_reason) == ("ab", "cd", "stop")
    assert done.token_ids == tuple(b"cd!")
    assert done.logprobs == tuple(-float(token) for token in b"cd!")
    assert done.prompt_token_ids == tuple(b"ab")
