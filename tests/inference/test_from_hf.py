"""From a Hugging Face folder to text: what transformers generates, alone and over tp 2."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from mcore_ckpt.convert import convert
from mcore_inference import LLM, Completion, SamplingParams
from mcore_inference.cli import main
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool

sys.path.append(str(Path(__file__).parents[1] / "models" / "hf"))

PROMPTS = ["hello", "the cat sat", "a", "word3 word5 </s>"]
PARAMS = SamplingParams(max_tokens=12)
CHAT = [{"role": "user", "content": "hi</s><|end|>"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    import folders

    folder = tmp_path_factory.mktemp("hf") / "model"
    folders.save(folders.llama(), folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    generation["eos_token_id"] = [2, 50]  # 50 is a letter
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM.from_hf(folder)


def theirs(folder: Path, prompt: str) -> list[int]:
    """The greedy tokens of transformers, prompt included; special tokens in it are mere text."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt, split_special_tokens=True)["input_ids"]])
    # Rows past the tokenizer's ids are no tokens: ours never says them.
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=PARAMS.max_tokens,
        do_sample=False,
        pad_token_id=2,
        suppress_tokens=[97, 98, 99],
    )
    return [int(token) for token in out[0]]


def test_greedy_tokens_are_those_of_transformers(folder: Path, llm: LLM) -> None:
    """Begin token, text and end tokens: whatever the folder's files say."""
    stopped = 0
    for done in llm.generate(PROMPTS, PARAMS):
        tokens = [*done.prompt_token_ids, *done.token_ids]
        assert tokens == theirs(folder, done.prompt)
        assert done.prompt_token_ids[0] == 1
        assert done.finish_reason == ("stop" if tokens[-1] in (2, 50) else "length")
        stopped += done.finish_reason == "stop"
    assert llm.end_ids == {2, 3, 50}  # the last from the template


def test_an_end_token_of_the_folder_ends_the_text(folder: Path, tmp_path: Path, llm: LLM) -> None:
    """A token in the middle of an answer, once a folder calls it an end, is its last."""
    free = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    prompt, tokens = next(
        (done.prompt, done.token_ids[: i + 1])
        for done in free
        for i in range(1, 12)
        if not {2, 3, done.token_ids[i]} & set(done.token_ids[:i])
    )
    end = tokens[-1]
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    done = LLM.from_hf(tmp_path / "model").generate(prompt, PARAMS)[0]
    assert done.token_ids == tokens
    assert done.finish_reason == "stop"
    (tmp_path / "model" / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "eos_token_id": [end]}))
    assert LLM.from_hf(tmp_path / "model").end_ids == {2, 3, end}
    (tmp_path / "model" / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json: no JSON object"):
        LLM.from_hf(tmp_path / "model")


def test_special_tokens_come_from_the_template_alone(folder: Path, llm: LLM) -> None:
    ids = llm.chat_template.encode(CHAT, llm.tokenizer)
    assert ids.count(3) == 1
    assert 2 not in ids
    assert llm.tokenizer.decode(ids) == "user:hi</s><|end|>assistant:"


def test_a_checkpoint_made_of_the_folder_says_the_same(
    folder: Path, tmp_path: Path, llm: LLM
) -> None:
    convert(("hf", folder), ("native", tmp_path / "run"))
    native = LLM.from_checkpoint(tmp_path / "run")
    assert native.end_ids == llm.end_ids
    assert native.chat_template.source == llm.chat_template.source
    assert native.generate(PROMPTS, PARAMS) == llm.generate(PROMPTS, PARAMS)


def generate_over_ranks(folder: Path) -> list[Completion]:
    mesh = ParallelMesh.create(ParallelConfig(tp=2))
    assert mesh is not None
    return LLM.from_hf(folder, mesh=mesh).generate(PROMPTS, PARAMS)


def test_two_ranks_say_what_one_process_says(ranks: RankPool, folder: Path, llm: LLM) -> None:
    alone = llm.generate(PROMPTS, PARAMS)
    for got in ranks.run(generate_over_ranks, 2, folder):
        assert [done.token_ids for done in got] == [done.token_ids for done in alone]


def fail_over_ranks(folder: Path) -> str:
    mesh = ParallelMesh.create(ParallelConfig(tp=2))
    assert mesh is not None
    with pytest.raises(ValueError, match=r"config\.json: hidden_act='gelu' is not") as caught:
        LLM.from_hf(folder, mesh=mesh)
    return str(caught.value)


def test_every_rank_hears_why_a_folder_cannot_be_read(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    assert len(set(ranks.run(fail_over_ranks, 2, tmp_path / "model"))) == 1


def test_a_tokenizer_may_lie_elsewhere(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r'no tokenizer of ours, it lacks "format"'):
        LLM.from_hf(tmp_path / "model")
    assert LLM.from_hf(tmp_path / "model", tokenizer=folder).tokenizer.vocab_size == 97


def test_the_command_reads_folders(
    folder: Path, tmp_path: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--max-tokens", "12"]
    assert main(["generate", "--hf", str(folder), *arguments]) == 0
    expected = [done.prompt + done.text for done in llm.generate(PROMPTS[:2], PARAMS)]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    assert main(["generate", "--hf", str(tmp_path), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"mcore-inference: .* has no config\.json: .*\n", error)
    with pytest.raises(SystemExit):
        main(["generate", "--hf", str(folder), "--checkpoint", str(folder), "--prompt", "a"])
