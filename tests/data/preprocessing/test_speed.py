"""Preprocessing beside the tokenizers themselves, and its memory on a corpus of 100 MB.

Nightly: `-s` prints the figures.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not os.environ.get("NIGHTLY"), reason="set NIGHTLY=1"),
]
ONE_THREAD = {**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

# The texts are there before the clock starts; batches of about 1 MiB, as a worker has them.
RAW = """
import json, sys, time
from mcore_data import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
native = {
    "HFTokenizer": lambda t: t._tokenizer.encode_batch_fast,
    "SentencePieceTokenizer": lambda t: lambda texts: t._processor.encode(texts, num_threads=1),
    "TiktokenTokenizer": lambda t: lambda texts: [t._encoding.encode_ordinary(x) for x in texts],
}[type(tokenizer).__name__](tokenizer)
batches, size = [[]], 0
for line in open(sys.argv[2], "rb"):
    batches[-1].append(json.loads(line)["text"])
    size += len(line)
    if size > 1 << 20:
        batches.append([])
        size = 0
native(batches[0][:1])
begin = time.process_time()
for batch in batches:
    native(batch)
print(time.process_time() - begin)
"""
PREPROCESS = "from mcore_data.cli import main; import sys; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """JSON lines of real source code, of 12, 40 and 120 MB."""
    folder = tmp_path_factory.mktemp("speed")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    texts = [path.read_bytes().decode("utf-8", "replace") for path in files]
    lines = [json.dumps({"text": text}) + "\n" for text in texts if len(text) < 200_000]
    for name, wanted in (("small", 12), ("middle", 40), ("large", 120)):
        size = i = 0
        with open(folder / f"{name}.jsonl", "w") as out:
            while size < wanted * 1_000_000:
                size += out.write(lines[i % len(lines)])
                i += 1
    return folder


@pytest.fixture(scope="module", params=["hf", "sentencepiece", "tiktoken"])
def tokenizer(request, corpora):
    """One of each library, of 8,000 tokens, trained on a part of the corpus."""
    import base64

    from mcore_data import train_sentencepiece
    from mcore_data.tokenizers.ranks import SCHEMES

    folder = corpora / request.param
    if folder.is_dir():
        return folder
    small = corpora / "small.jsonl"
    if request.param == "sentencepiece":
        train_sentencepiece([small], output=folder, vocab_size=8000, sample_chars=2_000_000)
        return folder
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=sorted(byte_level.alphabet()), show_progress=False
    )
    with open(small) as file:
        made.train_from_iterator([json.loads(next(file))["text"] for _ in range(400)], trainer)
    folder.mkdir()
    if request.param == "hf":
        made.save(str(folder / "tokenizer.json"))
        return folder
    vocabulary = json.loads(made.to_str())["model"]["vocab"]
    order = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in order]
    letters = {chr(b): b for b in order} | {chr(256 + n): b for n, b in enumerate(rest)}
    with open(folder / "x.tiktoken", "w") as file:
        for token, rank in vocabulary.items():
            raw = base64.b64encode(bytes(letters[c] for c in token)).decode()
            file.write(f"{raw} {rank}\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "format": "mcore-tokenizer",
                "version": 1,
                "kind": "tiktoken",
                "file": "x.tiktoken",
                "pattern": SCHEMES["gpt2"].pattern,
            }
        )
    )
    return folder


def run(corpus, tokenizer, output, workers):
    """Return CPU seconds of a run, of all its processes, and the most memory of one, in MB."""
    options = ["--tokenizer", str(tokenizer), "--output", str(output), "--workers", str(workers)]
    code = f"""
import resource, subprocess, sys
subprocess.run([sys.executable, "-c", {PREPROCESS!r}, *sys.argv[1:]], check=True,
               stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1000)
"""
    command = [sys.executable, "-c", code, "preprocess", str(corpus), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=ONE_THREAD)
    cpu, memory = map(float, done.stdout.split())
    return cpu, memory


def test_as_fast_as_the_tokenizer_itself(corpora, tokenizer):
    """CPU time of reading, tokenising and writing against that of the library's batch call alone.

    At least 0.9 of its speed; what both need to start is not counted.
    """
    size = "large" if tokenizer.name == "tiktoken" else "middle"
    corpus = corpora / f"{size}.jsonl"
    (corpora / "one.jsonl").write_text('{"text": "x"}\n')
    start, _ = run(corpora / "one.jsonl", tokenizer, corpora / "one", workers=2)
    command = [sys.executable, "-c", RAW, str(tokenizer), str(corpus)]
    ratios = []
    for turn in range(2):
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=ONE_THREAD)
        library = float(done.stdout)
        cpu, _ = run(corpus, tokenizer, corpora / f"{tokenizer.name}{turn}", workers=2)
        ratios.append(library / (cpu - start))
        print(f"\n{tokenizer.name}: {library:.1f} s, preprocess {cpu:.1f} s ({start:.1f} to start)")
        print(f"{ratios[-1]:.2f} x the speed of the library")
    assert max(ratios) >= 0.9, ratios


def test_memory_does_not_grow_with_the_corpus(corpora):
    """The most that any process holds, for 12 MB and for 120 MB."""
    peaks = [
        run(corpora / f"{size}.jsonl", "byte", corpora / size, 2)[1] for size in ("small", "large")
    ]
    print(f"\npeak memory: {peaks[0]:.0f} MB for 12 MB, {peaks[1]:.0f} MB for 120 MB")
    assert peaks[1] < 1.1 * peaks[0]
