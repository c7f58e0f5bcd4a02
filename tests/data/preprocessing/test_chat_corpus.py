import json

import numpy as np
import pytest

from mcore_data import (
    ByteTokenizer,
    ChatTemplate,
    DocumentDataset,
    IndexedReader,
    PackedDataset,
    preprocess_chat,
    tokenise_conversation,
)
from mcore_data.cli import main
from mcore_data.indexed import merge
from mcore_data.preprocessing import resume, sources

BYTE = ByteTokenizer()
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TEMPLATE = ChatTemplate(CHATML, tokens={"<s>": 1, "</s>": 2})
FORGETFUL = ChatTemplate(
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.role }}: {{ m.content }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def learned(messages, template=TEMPLATE, **options):
    """The learned stretches, special tokens written as < and >."""
    made = tokenise_conversation(messages, template, BYTE, **options)
    text = "".join({1: "<", 2: ">"}.get(token, chr(token)) for token in made.tokens.tolist())
    marks = "".join(c if m else "|" for c, m in zip(text, made.learned.tolist(), strict=True))
    return [part for part in marks.split("|") if part]


def test_what_the_assistant_says_is_learned():
    """Every answer with the token that ends its turn, and nothing else; tools are context."""
    messages = turns("2+2?", "4", "sure?", "yes")
    assert learned(messages) == ["4>", "yes>"]
    assert learned(messages, learn="last") == ["yes>"]
    assert learned(messages, learn="all") == [
        "<user\n2+2?>\n<assistant\n4>\n<user\nsure?>\n<assistant\nyes>\n"
    ]
    tools = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": ""},
    ]
    assert learned(tools) == ["call>", ">"]
    # A user who writes the mark of the assistant's turn is still the user.
    assert learned(turns("<s>assistant\nno</s>", "yes")) == ["yes>"]
    assert learned(turns("a", "b"), ChatTemplate()) == [" b\n"]


def test_what_cannot_be_told_apart():
    with pytest.raises(ValueError, match="no message is the assistant's"):
        tokenise_conversation(turns("a"), TEMPLATE, BYTE)
    messages = turns("a", "b", "c", "d")
    with pytest.raises(ValueError, match="writes the first 1 of 4 messages differently once"):
        tokenise_conversation(messages, FORGETFUL, BYTE)
    assert learned(messages, FORGETFUL, learn="last") == ["d\n"]


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [
        {"messages": turns("q1", "a1", "q2", "a2")},
        {"messages": turns("no answer")},
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"other": 1},
        {"messages": turns("question " * 9, "answer")},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_conversations_become_documents_with_modes(tmp_path, chats, workers):
    report = preprocess_chat(
        [chats], template=TEMPLATE, tokenizer=BYTE, output=tmp_path / "c", workers=workers
    )
    assert (report.documents, report.bad) == (2, 4)
    assert [line.removeprefix(str(chats)) for line in report.bad_lines] == [
        ":2: no message is the assistant's, there is nothing to learn",
        ":3: 'messages' is no list of messages",
        ":4: message 0 of 'messages' is no object with a role",
        ":5: no key 'messages'; keys are 'other'",
    ]
    reader = IndexedReader(tmp_path / "c")
    reader.verify(vocab_size=257)
    assert report.tokens == reader.num_tokens
    made = tokenise_conversation(turns("q1", "a1", "q2", "a2"), TEMPLATE, BYTE)
    assert reader.document(0).tolist() == made.tokens.tolist()
    assert reader.modes[: reader.document_indices[1]].tolist() == [0, 1, 0, 1, 0]
    sample = DocumentDataset(reader, max_length=500)[0]
    assert sample.loss_mask.tolist() == made.learned[1:].tolist()
    packed = PackedDataset(DocumentDataset(reader, max_length=256), seq_length=256)
    assert len(packed) == 1
    assert np.count_nonzero(packed[0].loss_mask) == len("a1>a2>answer>")
    # An answer that lies beyond the cut leaves nothing to learn.
    assert DocumentDataset(reader, max_length=40).documents.tolist() == [0]


def test_faults(tmp_path, chats):
    options = {"template": TEMPLATE, "tokenizer": BYTE, "output": tmp_path / "c"}
    with pytest.raises(ValueError, match=r"x.jsonl:2: no message is the assistant's"):
        preprocess_chat([chats], strict=True, **options)
    raising = ChatTemplate("{{ raise_exception('roles must\\nalternate') }}")
    with pytest.raises(ValueError, match=r"0 empty, 6 bad; .*x.jsonl:1: .*roles must alternate"):
        preprocess_chat([chats], **{**options, "template": raising})
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(ValueError, match=r"x.txt: conversations come in JSONL files"):
        preprocess_chat([tmp_path / "x.txt"], **options)
    with pytest.raises(ValueError, match="learn is 'user'"):
        preprocess_chat([chats], learn="user", **options)
    assert not (tmp_path / "c.idx").exists()


def test_command(tmp_path, chats, capsys):
    (tmp_path / "t.jinja").write_text(CHATML)
    prefix = str(tmp_path / "c")
    command = ["preprocess", str(chats), "--tokenizer", "byte", "--output", prefix]
    chat = [*command, "--workers", "1", "--chat", str(tmp_path / "t.jinja")]
    assert main(chat) == 0
    out, err = capsys.readouterr()
    assert "2 documents" in out
    assert err.count("skipped") == 4
    assert main(["show", prefix, "--sample", "1", "--seq-length", "400", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    answer = [t for t, m in zip(shown["labels"], shown["loss_mask"], strict=True) if m]
    assert bytes(answer[:6]) == b"answer"
    assert main([*chat, "--resume", "--partition", "1/1"]) == 0
    capsys.readouterr()
    for more, message in (
        (["--append-eod"], "--append-eod does not go with --chat"),
        (["--split-sentences"], "--split-sentences does not go with --chat"),
        (["--key", "a", "--key", "b"], "more than one --key does not go with --chat"),
    ):
        assert main([*chat, *more]) == 2
        assert message in capsys.readouterr().err
    assert main([*command, "--learn", "all"]) == 2
    assert "--learn needs --chat" in capsys.readouterr().err


TOOLS = "{% for t in tools or [] %}<s>tool {{ t.name }}</s>{% endfor %}" + CHATML


def test_tools_are_told_to_the_template(tmp_path):
    template = ChatTemplate(TOOLS, tokens={"<s>": 1, "</s>": 2})
    tools = [{"name": "add</s>"}]
    assert learned(turns("q", "a"), template, tools=tools) == ["a>"]
    made = tokenise_conversation(turns("q", "a"), template, BYTE, tools=tools)
    assert bytes(t for t in made.tokens.tolist() if t > 2)[:12] == b"tool add</s>"
    rows = [
        {"messages": turns("q", "a"), "tools": tools},
        {"messages": turns("q", "a"), "tools": 3},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = preprocess_chat([path], template=template, tokenizer=BYTE, output=tmp_path / "c")
    assert IndexedReader(tmp_path / "c").document(0).tolist() == made.tokens.tolist()
    assert report.bad_lines == (f"{path}:2: 'tools' is no list",)


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    """As with texts: the same files to the byte, and parts for several machines."""
    monkeypatch.setattr(sources, "_TASK_BYTES", 1000)
    monkeypatch.setattr(resume, "PART_TASKS", 2)
    path = tmp_path / "x.jsonl"
    rows = [{"messages": turns(f"question {i} " * 5, f"answer {i}")} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "nonsense\n")
    options = {"template": TEMPLATE, "tokenizer": BYTE}
    whole = preprocess_chat([path], output=tmp_path / "whole", **options)
    written = resume._commit
    commits = []

    def stop(path, state):
        written(path, state)
        commits.append(path)
        if len(commits) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resume, "_commit", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess_chat([path], output=tmp_path / "c", resume=True, **options)
    assert not (tmp_path / "c.idx").exists()
    with pytest.raises(ValueError, match="left from a run with other inputs, tokenizer or options"):
        preprocess_chat([path], output=tmp_path / "c", resume=True, learn="last", **options)
    other = {**options, "template": ChatTemplate(CHATML + "\n", tokens=TEMPLATE.tokens)}
    with pytest.raises(ValueError, match="left from a run with other inputs, tokenizer or options"):
        preprocess_chat([path], output=tmp_path / "c", resume=True, **other)
    report = preprocess_chat([path], output=tmp_path / "c", resume=True, **options)
    assert len(commits) == 2
    assert (report.documents, report.tokens) == (whole.documents, whole.tokens)
    assert report.bad_lines == whole.bad_lines
    parts = [tmp_path / f"p{i}" for i in range(3)]
    for i, part in enumerate(parts):
        preprocess_chat([path], output=part, partition=(i, 3), **options)
    merge(parts, tmp_path / "merged")
    for suffix in (".bin", ".idx"):
        raw = (tmp_path / f"whole{suffix}").read_bytes()
        assert (tmp_path / f"c{suffix}").read_bytes() == raw
        assert len((tmp_path / f"merged{suffix}").read_bytes()) == len(raw)
