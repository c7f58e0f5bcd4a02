"""Every kind of tokenizer against the library that its files are of; what all have in common."""

import base64
import json
import pickle
import re
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_data import ByteTokenizer, ChatTemplate, NullTokenizer, Tokenizer, load_tokenizer
from mcore_data.tokenizers import tokenizer_files
from mcore_data.tokenizers.incremental import WindowDecoder
from mcore_data.tokenizers.ranks import SCHEMES

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")

CODE = Path(__file__).read_text()
CJK = "\u5929\u5730\u7384\u9ec3\uff0c\u5b87\u5b99\u3002\u65e5\u672c\u8a9e\u306e\u6587 \ud55c\uae00"
EMOJI = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600\U0001f44d\U0001f3fd \u2764\ufe0f"
BROKEN = "na\u00efve caf\u00e9".encode("latin-1").decode("utf-8", "replace")
SAMPLES = [
    *(
        "",
        " ",
        "\n\n",
        "Hello, world! It's 12345.\r\n",
        "\x00\x07\x1b[0m\x7f\x85\u2028",
        CJK,
        EMOJI,
    ),
    *(
        BROKEN,
        "\u2581 \u2581",
        "</s><s>[CLS] <|endoftext|> <unk>",
        "a\u0301\ufb01\uff21",
        CODE[:4000],
    ),
    "def f(x):\n\tif x:  # \u00e9\n\t\treturn  [x]\n\n\n",
]


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE of 500 merges, and its tokens as bytes by rank."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=756, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([CODE, CJK * 9, EMOJI * 9], trainer)
    model = json.loads(made.to_str())["model"]
    # The alphabet of GPT-2: a letter for each byte, itself where it can be seen.
    order = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in order]
    letters = {chr(b): b for b in order} | {chr(256 + n): b for n, b in enumerate(rest)}
    ranks = {bytes(letters[c] for c in token): i for token, i in model["vocab"].items()}
    return made, model, ranks


@pytest.fixture(scope="module")
def folders(trained, tmp_path_factory, sentencepiece_dir):
    """A folder or file for every kind."""
    _, model, ranks = trained
    root = tmp_path_factory.mktemp("kinds")
    for name in ("gpt2", "tiktoken", "tekken", "wordpiece"):
        (root / name).mkdir()
    vocabulary = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    write_json(root / "gpt2" / "encoder.json", vocabulary)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (root / "gpt2" / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (root / "tiktoken" / "x.tiktoken").write_text("".join(lines))
    descriptor = {
        "format": "mcore-tokenizer",
        "version": 1,
        "kind": "tiktoken",
        "file": "x.tiktoken",
        "pattern": SCHEMES["gpt2"].pattern,
        "special_tokens": {"<|endoftext|>": 756, "<|pad|>": 760},
        "roles": {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
    }
    write_json(root / "tiktoken" / "tokenizer_config.json", descriptor)
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    config = {
        "pattern": SCHEMES["o200k_base"].pattern,
        "num_vocab_tokens": 756,
        "default_vocab_size": 700 + 30,
        "default_num_special_tokens": 30,
        "version": "v3",
    }
    write_json(root / "tekken" / "tekken.json", {"config": config, "vocab": vocab})
    words = sorted({*re.findall("[a-z]+", CODE.lower())})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(33, 127)), *words]
    pieces = [p for p in pieces if p == p.lower() or p.startswith("[")]
    pieces += [f"##{chr(c)}" for c in range(97, 123)] + ["\u5929", "\u5730"]
    (root / "wordpiece" / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)) + "\n")
    return {name: root / name for name in ("gpt2", "tiktoken", "tekken", "wordpiece")} | {
        "sentencepiece": sentencepiece_dir,
        "model": sentencepiece_dir / "tokenizer.model",
        "byte": "byte",
    }


@pytest.fixture(
    scope="module",
    params=["gpt2", "tiktoken", "tekken", "wordpiece", "sentencepiece", "model", "byte"],
)
def kind(request, folders):
    return request.param, load_tokenizer(folders[request.param])


EXACT = ("gpt2", "tiktoken", "tekken", "sentencepiece", "byte")


def pushed(decoder, ids):
    return "".join(decoder.push(i) for i in ids) + decoder.finish()


@given(text=st.one_of(st.text(), st.sampled_from(SAMPLES)), cut=st.integers(0, 40))
@example(text=EMOJI, cut=3)
@example(text=CODE[:2000], cut=0)
@settings(max_examples=40, deadline=None)
def test_what_all_have_in_common(kind, text, cut):
    """Text comes back; batches, offsets and streams agree with encode and decode."""
    name, tokenizer = kind
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert not set(ids) & set(tokenizer.special_tokens.values()) - {tokenizer.unk_id}
    if name in EXACT:
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "a", text]) == [ids, tokenizer.encode("a"), ids]
    again, spans = tokenizer.encode_with_offsets(text)
    assert again == ids
    assert len(spans) == len(ids)
    assert all(0 <= a <= b <= len(text) for a, b in spans)
    assert [a for a, _ in spans] == sorted(a for a, _ in spans)
    if name in EXACT:
        covered = set().union(*(range(a, b) for a, b in spans))
        assert covered == set(range(len(text)))
    # Cut anywhere: what a stream gives is what decoding all of it gives, broken ends included.
    ends = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
    for part in (ids, ids[cut:], ids[: len(ids) - cut], [*ends, *ids[cut:], *ends, *ids[:cut]]):
        assert pushed(tokenizer.decoder(), part) == tokenizer.decode(part)


@given(ids=st.lists(st.integers(0, 255), max_size=90))
@settings(max_examples=60, deadline=None)
def test_streams_of_broken_bytes(ids):
    """Both ways to stream, for bytes in any order."""
    tokenizer = ByteTokenizer()
    assert pushed(tokenizer.decoder(), ids) == tokenizer.decode(ids)
    assert pushed(WindowDecoder(tokenizer.decode), ids) == tokenizer.decode(ids)


def test_a_stream_says_at_once_what_is_certain(kind):
    _, tokenizer = kind
    text = "one two three"
    ids, spans = tokenizer.encode_with_offsets(text)
    decoder = tokenizer.decoder()
    parts = [decoder.push(i) for i in ids]
    assert "".join(parts) == tokenizer.decode(ids)
    assert sum(map(bool, parts)) >= len({span for span in spans if span[0] < span[1]}) - 1
    with pytest.raises(ValueError, match="lies outside"):
        decoder.push(tokenizer.vocab_size + 5)
    assert decoder.finish() == ""


@pytest.mark.parametrize("text", SAMPLES)
def test_ids_are_those_of_the_libraries(trained, folders, text):
    made, _, ranks = trained
    assert load_tokenizer(folders["gpt2"]).encode(text) == made.encode(text).ids
    theirs = tiktoken.Encoding(
        "x", pat_str=SCHEMES["gpt2"].pattern, mergeable_ranks=ranks, special_tokens={}
    )
    assert load_tokenizer(folders["tiktoken"]).encode(text) == theirs.encode_ordinary(text)
    assert theirs.encode_ordinary(text) == made.encode(text).ids
    first = {token: rank for token, rank in ranks.items() if rank < 700}
    theirs = tiktoken.Encoding(
        "x", pat_str=SCHEMES["o200k_base"].pattern, mergeable_ranks=first, special_tokens={}
    )
    ids = [i + 30 for i in theirs.encode_ordinary(text)]
    assert load_tokenizer(folders["tekken"]).encode(text) == ids
    pieces = (folders["wordpiece"] / "vocab.txt").read_text().splitlines()
    bert = tokenizers.BertWordPieceTokenizer({piece: i for i, piece in enumerate(pieces)})
    bert._tokenizer.encode_special_tokens = True
    ours = load_tokenizer(folders["wordpiece"])
    assert ours.encode(text) == bert.encode(text, add_special_tokens=False).ids
    assert ours.decode(ours.encode(text)) == bert.decode(ours.encode(text))


def test_special_ids(folders):
    """Ids that a kind has not are None; sizes count the special ids."""
    for name, size, bos, eos, pad, unk, prefix in (
        ("gpt2", 757, 756, 756, None, None, ()),
        ("tiktoken", 761, None, 756, 760, None, ()),
        ("tekken", 730, 1, 2, 11, 0, (1,)),
        ("wordpiece", None, 2, 3, 0, 1, (2,)),
    ):
        t = load_tokenizer(folders[name])
        assert (t.bos_id, t.eos_id, t.eod_id, t.pad_id, t.unk_id) == (bos, eos, eos, pad, unk)
        assert size in (None, t.vocab_size)
        assert t.prefix_ids == prefix
    assert load_tokenizer(folders["tekken"]).special_tokens["<SPECIAL_29>"] == 29
    assert load_tokenizer(folders["wordpiece"]).special_tokens["[MASK]"] == 4
    with pytest.raises(ValueError, match="id 758 lies outside"):
        load_tokenizer(folders["tiktoken"]).decode([758])  # below the last id, and nobody's


def test_saved_and_sent(kind, tmp_path):
    _, tokenizer = kind
    tokenizer.save(tmp_path / "t")
    for other in (load_tokenizer(tmp_path / "t"), pickle.loads(pickle.dumps(tokenizer))):
        for text in SAMPLES:
            assert other.encode(text) == tokenizer.encode(text)
        for role in ("vocab_size", "bos_id", "eos_id", "pad_id", "unk_id", "special_tokens"):
            assert getattr(other, role) == getattr(tokenizer, role), role


def test_chat_uses_the_special_tokens_of_the_file(folders):
    tokenizer = load_tokenizer(folders["tekken"])
    source = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}{{ eos_token }}"
    template = ChatTemplate(source, tokens=dict(tokenizer.special_tokens))
    loaded = ChatTemplate.load(folders["tekken"], tokenizer)
    assert (loaded.eos_token, loaded.tokens["[INST]"]) == ("</s>", 3)
    ids = template.encode([{"role": "user", "content": "[/INST]x"}], tokenizer)
    assert ids == [3, *tokenizer.encode("[/INST]x"), 4]


def test_numbers():
    tokenizer = load_tokenizer("null:100")
    assert isinstance(tokenizer, NullTokenizer)
    assert tokenizer.encode(" 5 99\n0 ") == [5, 99, 0]
    assert tokenizer.encode_with_offsets(" 5 99")[1] == [(1, 2), (3, 5)]
    assert tokenizer.decode([5, 100, 99]) == "5 99"
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.bos_id) == (101, 100, None)
    assert pushed(tokenizer.decoder(), [5, 99, 100, 0]) == "5 99 0"
    for text, message in (("1 x", "'x' at character 2 is no id from 0 to 99"), ("100", "'100' at")):
        with pytest.raises(ValueError, match=message):
            tokenizer.encode(text)
    for name, message in (("null:x", "null:N takes a number"), ("null:0", "of 0 ids, the least")):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(name)


def test_long_runs_do_not_break_the_library(folders):
    """Half a million blanks are cut; other long runs are whole."""
    tokenizer = load_tokenizer(folders["tiktoken"])
    text = "a" + " " * 1_100_000 + "b\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text[:499_000]) == tokenizer._encoding.encode_ordinary(text[:499_000])


def test_schemes_are_known_by_their_ranks(tmp_path):
    path = tmp_path / "x.tiktoken"
    size = SCHEMES["gpt2"].num_ranks
    tokens = [bytes([b]) for b in range(256)]
    tokens += [bytes([b % 256, b // 256 % 256, 7, b // 65536]) for b in range(size - 256)]
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)]
    path.write_text("".join(lines))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (50_257, 50_256)
    path.write_text("".join(lines[:300]))
    with pytest.raises(ValueError, match=r"x.tiktoken: 300 ranks are none of gpt2 \(50,256\), "):
        load_tokenizer(path)


def test_wordpiece_case_is_told_by_the_pieces_or_the_config(folders, tmp_path):
    pieces = (folders["wordpiece"] / "vocab.txt").read_text()
    (tmp_path / "vocab.txt").write_text(pieces + "Hello\n")
    assert len(load_tokenizer(tmp_path).encode("Hello")) == 1
    small = load_tokenizer(folders["wordpiece"])
    assert small.encode("HELLO") == small.encode("hello")
    write_json(tmp_path / "tokenizer_config.json", {"do_lower_case": True})
    assert load_tokenizer(tmp_path).encode("HELLO") == load_tokenizer(tmp_path).encode("hello")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_wordpiece_lines_end_at_line_ends_alone(folders, tmp_path, end):
    """Vocabularies hold the line separators of Unicode as pieces; ids count the lines of a file."""
    pieces = (folders["wordpiece"] / "vocab.txt").read_text().split()
    pieces[20:20] = ["\u2028", "x\x85y", "\x1d"]
    (tmp_path / "vocab.txt").write_bytes(end.join([*pieces, ""]).encode())
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == len(pieces)
    assert tokenizer.decode([len(pieces) - 1]) == pieces[-1].removeprefix("##")


def damaged(folder, tmp_path, name, change):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / name
    if callable(change):
        value = json.loads(file.read_text())
        change(value)
        change = json.dumps(value)
    file.write_text(change)


DAMAGES = [
    ("gpt2", "encoder.json", "{", r"encoder.json: no JSON \("),
    ("gpt2", "encoder.json", '{"a": "x"}', "encoder.json: no vocabulary"),
    ("gpt2", "vocab.bpe", "#version\na b c\n", "vocab.bpe:2: 'a b c' is no merge of two known"),
    ("gpt2", "vocab.bpe", "a b\nq \u6f22\n", "vocab.bpe:1: |vocab.bpe:2: "),
    ("tiktoken", "x.tiktoken", "YQ== 0\n!! 1\n", "x.tiktoken:2: no line of base64 and rank"),
    ("tiktoken", "x.tiktoken", "YQ== 7\n", "the 1 ranks are not 0, 1, 2"),
    ("tiktoken", "x.tiktoken", "YQ== 0\n", "255 of the 256 single bytes have no rank, the first"),
    ("tiktoken", "tokenizer_config.json", lambda c: c.update(pattern="("), r"pattern '\('"),
    (
        "tiktoken",
        "tokenizer_config.json",
        lambda c: c.update(pattern=3),
        "pattern is 3, it must be",
    ),
    (
        "tiktoken",
        "tokenizer_config.json",
        lambda c: c["special_tokens"].update(x=5),
        "special token 'x' has id 5; 0 to 755 are those of the ranks",
    ),
    (
        "tiktoken",
        "tokenizer_config.json",
        lambda c: c["roles"].update(eos_token="x"),
        "eos_token 'x' is no special token",
    ),
    ("tekken", "tekken.json", "[]", r"tekken.json: no tekken file \(TypeError"),
    ("tekken", "tekken.json", "nothing", r"tekken.json: no JSON"),
    ("tekken", "tekken.json", lambda c: c.pop("vocab"), r"no tekken file \(KeyError\('vocab'\)\)"),
    (
        "tekken",
        "tekken.json",
        lambda c: c["config"].update(default_vocab_size=900),
        "756 different tokens where its config says 870",
    ),
    (
        "gpt2",
        "encoder.json",
        lambda c: c.pop("\u0120"),
        r"encoder.json: 1 of the letters .* the 256 bytes have no id, the first is '\u0120'",
    ),
    (
        "gpt2",
        "encoder.json",
        lambda c: c.update({"a</w>": 9_999}),
        "encoder.json: no vocabulary of GPT-2's kind, 'a</w>' marks the end of a word",
    ),
    ("wordpiece", "vocab.txt", "[UNK]\n[CLS]\na\na\n", "vocab.txt:4: 'a' stands on line 3 too"),
    (
        "wordpiece",
        "vocab.txt",
        "[UNK]\n[CLS]\n",
        r"no word pieces, \[SEP\] is not among its 2 lines",
    ),
]


@pytest.mark.parametrize(("name", "file", "change", "message"), DAMAGES)
def test_damaged_files_are_named(folders, tmp_path, name, file, change, message):
    damaged(folders[name], tmp_path, file, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_no_kind(tmp_path, folders, monkeypatch):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"x.json: no tokenizer; files .model, .tiktoken and tekken"
    ):
        load_tokenizer(tmp_path / "x.json")
    for library, name in (("tiktoken", "tekken"), ("tokenizers", "gpt2")):
        for module in ("tiktoken", "hf"):
            monkeypatch.delitem(sys.modules, f"mcore_data.tokenizers.{module}", raising=False)
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ValueError, match=re.escape("pip install 'mcore-data[")):
            load_tokenizer(folders[name])


def test_a_folder_with_a_model_gives_its_tokenizer_alone(folders, tmp_path):
    """What checkpoints take along: no weights, and all the files of ours."""
    for path in folders["gpt2"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"x" * 99)
    assert {p.name for p in tokenizer_files(tmp_path)} == {"encoder.json", "vocab.bpe"}
    names = {p.name for p in tokenizer_files(folders["tiktoken"])}
    assert names == {"tokenizer_config.json", "x.tiktoken"}


def test_a_kind_of_ones_own_needs_little():
    """`encode` and `decode` give the rest."""

    class Letters(Tokenizer):
        def encode(self, text):
            return [ord(c) for c in text]

        def decode(self, ids):
            return "".join(map(chr, ids))

    letters = Letters()
    assert letters.encode_batch(["ab", ""]) == [[97, 98], []]
    assert pushed(letters.decoder(), [97, 98, 0xFFFD]) == "ab\ufffd"
    assert letters.special_tokens == {}
