import json

import numpy as np
import pytest

from mcore_data import (
    ByteTokenizer,
    ChatTemplate,
    IndexedReader,
    IndexedWriter,
    PackedDataset,
    PreferenceDataset,
    add_preference,
    collate_pairs,
    preprocess_preferences,
    tokenise_preference,
)
from mcore_data.cli import main

BYTE = ByteTokenizer()
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TEMPLATE = ChatTemplate(CHATML, tokens={"<s>": 1, "</s>": 2})


def text(tokens):
    return "".join({1: "<", 2: ">"}.get(token, chr(token)) for token in tokens.tolist())


def said(role, content):
    return {"role": role, "content": content}


def test_a_prompt_and_two_answers():
    """Texts, messages, and whole conversations with the same beginning are the same pair."""
    history = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    for row, prompt in (
        ({"prompt": "2+2?", "chosen": "4", "rejected": "five"}, "<user\n2+2?>\n<assistant\n"),
        (
            {
                "prompt": history,
                "chosen": [said("assistant", "4")],
                "rejected": [said("assistant", "five")],
            },
            "<user\na>\n<assistant\nb>\n<user\nc>\n<assistant\n",
        ),
        (
            {
                "chosen": [*history, said("assistant", "4")],
                "rejected": [*history, said("assistant", "five")],
            },
            "<user\na>\n<assistant\nb>\n<user\nc>\n<assistant\n",
        ),
    ):
        pair = tokenise_preference(row, TEMPLATE, BYTE)
        assert [text(pair.prompt), text(pair.chosen), text(pair.rejected)] == [
            prompt,
            "4>",
            "five>",
        ]
    other = {"chosen": [said("user", "a"), said("assistant", "x")], "rejected": "y"}
    for row, message in (
        ({"prompt": "a", "chosen": "b"}, "no key 'rejected'; keys are 'prompt', 'chosen'"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "3 is neither a text nor a list"),
        ({"prompt": "a", "chosen": [said("user", "b")], "rejected": "c"}, "no message is the"),
        (other, "chosen and rejected follow different prompts, from token"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenise_preference(row, TEMPLATE, BYTE)


@pytest.fixture
def pairs(tmp_path):
    rows = [("abcd", "EF", "g"), ("h", "I", "jkl"), ("mn", "OPQRSTU", "v")]
    with IndexedWriter(tmp_path / "p", np.uint16, multimodal=True) as writer:
        for row in rows:
            add_preference(writer, *(np.frombuffer(part.encode(), np.uint8) for part in row))
    return IndexedReader(tmp_path / "p")


def test_a_pair_is_two_segments_with_one_prompt(pairs):
    dataset = PreferenceDataset(pairs, max_length=8)
    assert dataset.lengths.tolist() == [5 + 4, 1 + 3, 8 + 2]
    assert (len(dataset), dataset.left_out, dataset.truncated) == (3, 0, 0)
    sample = dataset[0]
    assert text(sample.tokens) == "abcdEabcd"
    assert text(sample.labels) == "bcdEFbcdg"
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert sample.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert sample.cu_seqlens.tolist() == [0, 5, 9]
    for k in range(3):
        assert len(dataset[k].tokens) == dataset.lengths[k]
    packed = PackedDataset(dataset, seq_length=14)
    bounds = [packed[i].cu_seqlens.tolist() for i in range(len(packed))]
    assert bounds == [[0, 8, 10, 11, 14], [0, 5, 9, 14]]


def test_long_prompts_lose_their_beginning(pairs):
    """Both answers keep the same prompt; a pair whose answer is too long is left out."""
    dataset = PreferenceDataset(pairs, max_length=4)
    assert (dataset.left_out, dataset.truncated) == (1, 1)
    chosen, rejected = dataset.pair(0)
    assert [text(chosen.tokens), text(rejected.tokens)] == ["bcdE", "bcd"]
    assert [text(chosen.labels), text(rejected.labels)] == ["cdEF", "cdg"]
    assert [s.loss_mask.sum() for s in dataset.pair(1)] == [1, 3]
    with pytest.raises(IndexError, match="pair 2 of 2"):
        dataset.pair(2)


def test_pairs_are_stacked(pairs):
    dataset = PreferenceDataset(pairs, max_length=8)
    batch = collate_pairs([dataset.pair(0), dataset.pair(1)], [0, 1], pad_id=9, multiple=4)
    assert batch["tokens"].shape == (4, 8)
    assert batch["lengths"].tolist() == [5, 1, 4, 3]
    assert batch["tokens"][1].tolist() == [ord("h")] + [9] * 7
    assert batch["loss_mask"].sum(1).tolist() == [2, 1, 1, 3]
    assert batch["cu_seqlens"].tolist() == [0, 5, 8, 9, 16, 20, 24, 27, 32]
    assert batch["sample_ids"].tolist() == [0, 1]
    full = collate_pairs([dataset.pair(0)], [0])
    assert full["cu_seqlens"].tolist() == [0, 5, 9, 10]


def test_a_file_of_pairs(tmp_path):
    rows = [{"prompt": f"q{i}", "chosen": "yes" * (i + 1), "rejected": "no"} for i in range(3)]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    options = {"template": TEMPLATE, "tokenizer": BYTE}
    assert preprocess_preferences(path, output=tmp_path / "a", **options) == 3
    assert preprocess_preferences(rows, output=tmp_path / "b", **options) == 3
    for suffix in (".bin", ".idx"):
        one, two = (tmp_path / (name + suffix) for name in "ab")
        assert one.read_bytes() == two.read_bytes()
    dataset = PreferenceDataset(IndexedReader(tmp_path / "a"), max_length=64)
    learned = dataset[1].labels[dataset[1].loss_mask > 0]
    assert text(learned) == "yesyes>no>"
    for lines, message in (
        ('{"prompt": "a"}\n', "x.jsonl:1: no key 'chosen'"),
        (json.dumps(rows[0]) + "\nnonsense\n", "x.jsonl:2: no JSON"),
        ("[1]\n", "x.jsonl:1: no JSON object"),
        (99_999 * "[", "x.jsonl:1: no JSON"),
        ("", "there are no pairs"),
    ):
        path.write_text(lines)
        with pytest.raises(ValueError, match=message):
            preprocess_preferences(path, output=tmp_path / "c", **options)
    assert not list(tmp_path.glob("*c.*"))


def test_commands(tmp_path, capsys):
    path, out = tmp_path / "x.jsonl", str(tmp_path / "p")
    path.write_text('{"prompt": "q", "chosen": "yes", "rejected": "no"}\n')
    (tmp_path / "t.jinja").write_text(CHATML.replace("<s>", "").replace("</s>", ""))
    options = ["--tokenizer", "byte", "--output", out, "--template", str(tmp_path / "t.jinja")]
    assert main(["preferences", str(path), *options]) == 0
    assert capsys.readouterr().out == f"{out}.bin/.idx: 1 pairs\n"
    assert main(["show", out, "--json", "--tokenizer", "byte"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["text"] == "user\nq\nassistant\nyesuser\nq\nassistant\nno"
    assert len(shown["cu_seqlens"]) == 3
    path.write_text('{"prompt": "q", "chosen": "yes"}\n')
    assert main(["preferences", str(path), *options]) == 2
    assert capsys.readouterr().err.startswith(f"mcore-data: {path}:1: no key 'rejected'")


def test_files_of_something_else(pairs, tmp_path):
    with IndexedWriter(tmp_path / "plain", np.uint16) as writer:
        writer.add_document([1, 2, 3], [1, 1, 1])
    with IndexedWriter(tmp_path / "chat", np.uint16, multimodal=True) as writer:
        writer.add_document([1, 2, 3], [1, 1, 1], modes=[0, 1, 0])
    for name in ("plain", "chat"):
        with pytest.raises(ValueError, match="it holds no preference pairs"):
            PreferenceDataset(IndexedReader(tmp_path / name), max_length=8)
    for call, message in (
        (lambda: PreferenceDataset(pairs, max_length=0), "max_length is 0"),
        (lambda: PreferenceDataset(pairs, [0, 3], max_length=8), "documents 0 to 3 asked for"),
        (lambda: PreferenceDataset(pairs, [2], max_length=3), "none of 1 pairs has answers"),
        (lambda: add_preference(None, [1], [], [2]), r"\[1, 0, 1\] tokens, each must have some"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
