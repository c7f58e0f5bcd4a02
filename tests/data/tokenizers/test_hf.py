"""Tokenizers of Hugging Face against transformers' own, and what goes wrong with their files."""

import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_data import Tokenizer, load_tokenizer
from mcore_data.tokenizers import hf

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEXT = (Path(__file__).parent / "test_hf.py").read_text()
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
TRAINED = re.sub("[<>]", "", TEXT)  # no merge may make up a special token


def bytes_bpe() -> "tokenizers.Tokenizer":
    """As of GPT-2, SmolLM2 and Llama 3: BPE over bytes."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TRAINED], trainer)
    return made


def pieces_bpe() -> "tokenizers.Tokenizer":
    """As of Llama 2: blanks are a sign, one is put in front, unknown characters are bytes."""
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Prepend("\u2581"),
            tokenizers.normalizers.Replace(" ", "\u2581"),
        ]
    )
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*SPECIAL, *alphabet], show_progress=False
    )
    made.train_from_iterator([TRAINED.replace(" ", "\u2581")[:4000]], trainer)
    saved = json.loads(made.to_str())
    saved["added_tokens"] = saved["added_tokens"][: len(SPECIAL)]  # the bytes are ordinary pieces
    return tokenizers.Tokenizer.from_str(json.dumps(saved))


MAKERS: dict[str, Callable[[], "tokenizers.Tokenizer"]] = {
    "bytes": bytes_bpe,
    "pieces": pieces_bpe,
}
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "__type": "AddedToken"},
    "unk_token": "<unk>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
}


@pytest.fixture(scope="module", params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model: the tokenizer's files among others. A text begins with <s>."""
    folder = tmp_path_factory.mktemp(request.param)
    made = MAKERS[request.param]()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    made.enable_truncation(5)  # a file may ask for it: a corpus must not lose its texts
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> object:
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    made.backend_tokenizer.no_truncation()
    return made


TEXTS = ["", " ", "hello  world \n\t", "d\u00e9j\u00e0 vu \U0001f600\u6f22 ,.!", "\u2581 a\u2581"]


@given(text=st.text())
@example(text=TEXTS[3])
@example(text=TEXTS[4])
@settings(max_examples=100, deadline=None)
def test_ids_and_texts_are_those_of_transformers(
    tokenizer: Tokenizer, theirs: object, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)  # type: ignore[attr-defined]
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    with_special = [1, *ids, 2, 3]
    decode = theirs.decode  # type: ignore[attr-defined]
    assert tokenizer.decode(with_special) == decode(with_special, skip_special_tokens=True)


def test_nothing_is_cut_off(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(TEXT)) > 100
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_special_ids(tokenizer: Tokenizer) -> None:
    """Named in `tokenizer_config.json`, or in `special_tokens_map.json`."""
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2, 3)
    assert tokenizer.eod_id == 2
    assert tokenizer.prefix_ids == (1,)


def test_who_spells_a_special_token_writes_text(tokenizer: Tokenizer) -> None:
    text = "a</s>b<s>"
    ids = tokenizer.encode(text)
    assert not {1, 2} & set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*tokenizer.encode("a"), 2]) == "a"


@given(text=st.text(min_size=1))
@example(text="na\u00efve \U0001f468\u200d\U0001f469\u200d\U0001f467 \u6f22\u5b57")
@settings(max_examples=50, deadline=None)
def test_text_grows_with_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    """Whatever tokens are there, their text begins the whole one but for a broken end."""
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    for count in range(len(ids) + 1):
        part = tokenizer.decode(ids[:count])
        assert whole.startswith(part.rstrip("\ufffd"))
        assert len(part) - len(part.rstrip("\ufffd")) <= 3 or "\ufffd" in text


def test_only_broken_bytes_are_broken(tokenizer: Tokenizer) -> None:
    """Bytes of which the last are missing leave the characters before them whole."""
    ids = tokenizer.encode("\U0001f468\U0001f469")
    assert tokenizer.decode(ids[:-1]).rstrip("\ufffd") == "\U0001f468"
    assert tokenizer.decode([*ids[:-1], 2, *tokenizer.encode("a")]).startswith("\U0001f468\ufffd")


def test_it_travels_to_other_processes_and_folders(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = tokenizer.encode(TEXT)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(TEXT) == ids
    again.save(tmp_path / "new" / "folder")
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert loaded.encode(TEXT) == ids
    assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (1, 2, 3)


def test_its_files_are_saved_as_they_were_and_no_others(folder: Path, tmp_path: Path) -> None:
    load_tokenizer(folder).save(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in folder.iterdir()} - {"model.safetensors"}
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token == "</s>"


def test_without_a_config_there_are_no_special_ids(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    bare = load_tokenizer(tmp_path)
    assert (bare.bos_id, bare.eos_id, bare.eod_id, bare.pad_id, bare.unk_id) == (None,) * 5


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": b"{"}, r"tokenizer\.json: no tokenizer \("),
        ({"tokenizer_config.json": b"{"}, r"tokenizer_config\.json: no JSON \("),
        ({"tokenizer_config.json": b"[]"}, r"tokenizer_config\.json: it holds no JSON object"),
        (
            {"tokenizer_config.json": b'{"eos_token": "<end>"}'},
            r"eos_token '<end>' is not in the vocabulary",
        ),
    ],
)
def test_damaged_files_are_named(
    folder: Path, tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    load_tokenizer(folder).save(tmp_path)
    for name, contents in files.items():
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}.*{message}"):
        load_tokenizer(tmp_path)


def test_faults_of_the_caller(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate U\+D83D"):
        tokenizer.encode("ab\ud83d")
    size = tokenizer.vocab_size
    for bad in (-1, size):
        with pytest.raises(ValueError, match=f"id {bad} lies outside the vocabulary of {size}"):
            tokenizer.decode([bad])
    with pytest.raises(ValueError, match=r"no tokenizer, it has no tokenizer\.json"):
        hf.HFTokenizer.from_folder(tmp_path)


def test_the_library_that_is_missing_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mcore_data.tokenizers.hf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'mcore-data[hf]'")):
        load_tokenizer(folder)
