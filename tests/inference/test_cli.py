"""`mcore-inference generate`, in this process."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_inference import LLM, SamplingParams
from mcore_inference.cli import main
from mcore_inference.source import open_checkpoint
from mcore_models import build_model
from mcore_parallel import RngKey

sys.path.append(str(Path(__file__).parent))
from small_models import GPT2, LLAMA, save_checkpoint, stored


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    save_checkpoint(build_model(LLAMA, key=RngKey(3)), folder)
    return folder


def generate(folder: Path, *arguments: str) -> int:
    return main(["generate", "--checkpoint", str(folder), *arguments])


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_the_prompt_is_printed_with_its_continuation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "--prompt", "hello", "--max-tokens", "7") == 0
    done = LLM.from_checkpoint(folder).generate("hello", SamplingParams(max_tokens=7))[0]
    assert capsys.readouterr().out == f"hello{done.text}\n"


def test_json_has_a_line_per_prompt_and_every_option_counts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-tokens", "6", "--temperature", "1.5", "--top-k", "30", "--top-p", "0.8"]
    options += ["--seed", "11", "--ignore-eos", "--tokenizer", "byte", "--dtype", "bfloat16"]
    assert generate(folder, "--prompt", "hello", "--prompt", "hi", *options, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    params = SamplingParams(
        max_tokens=6, temperature=1.5, top_k=30, top_p=0.8, seed=11, ignore_eos=True
    )
    llm = LLM.from_checkpoint(folder, dtype=torch.bfloat16)
    for row, done in zip(rows, llm.generate(["hello", "hi"], params), strict=True):
        assert row == {
            "prompt": done.prompt,
            "text": done.text,
            "token_ids": list(done.token_ids),
            "logprobs": list(done.logprobs),
            "finish_reason": "length",
        }


@pytest.mark.parametrize("scheme", ["memory", "tensorstore+file"])
def test_a_checkpoint_in_object_storage_is_taken_by_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    address = f"{scheme}://{tmp_path}/run"
    model = build_model(LLAMA, key=RngKey(3))
    folder = tmp_path / "here"
    save_checkpoint(model, folder)
    files: dict[str, Path | bytes] = {
        "tokenizer": tmp_path / "tokenizer",
        "hf/generation_config.json": b'{"eos_token_id": [7, 9]}',
        "notes/long.txt": b"for nobody",
    }
    there = mcore_ckpt.save(
        address, step=4, tensors=stored(model), state={"config": {"model": asdict(LLAMA)}},
        files=files,
    )  # fmt: skip
    shutil.rmtree(tmp_path / "tokenizer")
    rules = SamplingParams(max_tokens=7)
    expected = LLM.from_checkpoint(folder).generate("hello", rules)
    for place in (address, str(there)):
        llm = LLM.from_checkpoint(place)
        assert {7, 9} <= llm.end_ids
        assert llm.generate("hello", rules) == expected
    asked = ["generate", "--checkpoint", address, "--prompt"]
    assert main([*asked, "hello", "--max-tokens", "7"]) == 0
    assert capsys.readouterr().out == f"hello{expected[0].text}\n"
    mcore_ckpt.save(
        address, step=5, tensors=stored(model), state={"config": {"model": asdict(LLAMA)}}
    )
    assert main([*asked, "a"]) == 2
    assert f"{address}/step_00000005 has no tokenizer in it" in error_of(capsys)
    if scheme == "memory":
        with pytest.raises(ValueError, match="is in the memory of each of 2 ranks for itself"):
            open_checkpoint(address, None, None, num_ranks=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty: give at least one token"),
        (["--prompt", "a", "--top-p", "2"], "top_p=2.0 must lie in 0 < top_p <= 1"),
        (["--prompt", "a", "--tokenizer", "nowhere"], "nowhere: no tokenizer"),
        (
            ["--prompt", "a", "--checkpoint", "s4://b/run"],
            "s4://b/run: unknown scheme s4://",
        ),
        (["--prompt", "a", "--checkpoint", "memory://b"], "no committed checkpoint at memory://b"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, *arguments) == 2
    assert error_of(capsys).startswith(f"mcore-inference: {message}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a machine without GPU")
def test_a_device_that_is_not_here_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "--prompt", "a", "--device", "cuda") == 2
    assert "no CUDA device" in error_of(capsys)


def test_folders_without_checkpoint_or_a_damaged_one_are_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(tmp_path / "nothing", "--prompt", "a") == 2
    assert "no committed checkpoint at" in error_of(capsys)
    step = save_checkpoint(build_model(GPT2), tmp_path / "all", tokenizer=False)
    assert generate(step, "--prompt", "a") == 2
    assert "has no tokenizer" in error_of(capsys)
    assert generate(step, "--prompt", "a" * 20, "--tokenizer", "byte") == 2
    assert "use max_tokens 5 or less" in error_of(capsys)
    (step / "manifest.json").write_text("{}")
    assert generate(step, "--prompt", "a") == 2
    assert "is damaged" in error_of(capsys)


def test_a_model_that_gives_no_numbers_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model(GPT2)
    model.get_parameter("final_norm.weight").data.fill_(torch.nan)
    save_checkpoint(model, tmp_path / "all")
    assert generate(tmp_path / "all", "--prompt", "a", "--max-tokens", "2") == 1
    assert "logits after 1 tokens are not finite" in error_of(capsys)


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--help"])
    assert ended.value.code == 0
    assert "(default: 64)" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2


def test_defaults_are_those_of_the_parameters() -> None:
    from mcore_inference.cli import _parser

    args = _parser().parse_args(["generate", "--checkpoint", "x", "--prompt", "y"])
    rules = SamplingParams()
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos"):
        assert getattr(args, name) == getattr(rules, name), name
