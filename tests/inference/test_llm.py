"""From a checkpoint to text: in one process, over tp 2, and the errors on the way."""

import json
import re
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mcore_ckpt
from mcore_data import ByteTokenizer
from mcore_inference import LLM, Completion, SamplingParams, load_weights
from mcore_inference.text import without_cut_character
from mcore_models import BuildContext, ModelConfig, build_model
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey
from mcore_parallel.testing import RankPool

sys.path.append(str(Path(__file__).parent))
from small_models import DRESSES, GPT2, LLAMA, PROMPTS, greedy_without_cache, save_checkpoint

RULES = [
    SamplingParams(max_tokens=8, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, seed=4),
    SamplingParams(max_tokens=5, temperature=0.8, top_k=20, top_p=0.9, seed=4),
    SamplingParams(max_tokens=0),
]
ASKING = SamplingParams(max_tokens=5, stop=("D", "H"), prompt_logprobs=True, top_logprobs=2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of committed checkpoints for each dress, each saved by one process."""
    made = {}
    for dress, config in DRESSES.items():
        made[dress] = tmp_path_factory.mktemp(dress) / "checkpoints"
        save_checkpoint(build_model(config, key=RngKey(3)), made[dress])
    return made


class Shift(nn.Module):
    """A mixer of somebody's own: a projection of each token, times a vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.project = nn.Linear(size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.project(hidden)
        return out


def shift(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    return Shift(config.hidden_size)


def test_parts_of_ones_own_are_built_by_the_builders_given(tmp_path: Path) -> None:
    config = replace(LLAMA, pattern=("S-", "*-"))
    model = build_model(config, builders={"S": shift}, key=RngKey(3)).eval()
    save_checkpoint(model, tmp_path / "checkpoints")
    llm = LLM.from_checkpoint(tmp_path / "checkpoints", builders={"S": shift})
    done = llm.generate(PROMPTS[1], RULES[0])[0]
    assert done.token_ids == greedy_without_cache(model, list(PROMPTS[1].encode()), 8)[0]
    with pytest.raises(ValueError, match="layer 0 asks for 'S', which nothing builds"):
        LLM.from_checkpoint(tmp_path / "checkpoints")


@pytest.mark.parametrize("dress", DRESSES)
def test_a_checkpoint_generates_what_the_saved_model_would(
    checkpoints: dict[str, Path], dress: str
) -> None:
    model = build_model(DRESSES[dress], key=RngKey(3)).eval()
    llm = LLM.from_checkpoint(checkpoints[dress])
    assert not llm.model.training
    for done, prompt in zip(llm.generate(PROMPTS, RULES[0]), PROMPTS, strict=True):
        tokens, _ = greedy_without_cache(model, list(prompt.encode()), 8)
        assert done.token_ids == tokens
        assert done.prompt == prompt
        assert done.prompt_token_ids == tuple(prompt.encode())
        tokenizer = ByteTokenizer()
        whole = tokenizer.decode([*prompt.encode(), *tokens])
        assert prompt + done.text == without_cut_character(whole)
    step = next(checkpoints[dress].iterdir())
    direct = LLM.from_checkpoint(step).generate(PROMPTS, RULES)
    assert direct == llm.generate(PROMPTS, RULES)
    assert direct[0].finish_reason == "length"
    for done in direct[1:3]:
        assert done.finish_reason == ("stop" if done.token_ids[-1] == 256 else "length")
    assert direct[3].finish_reason == "length"
    assert (direct[3].text, direct[3].token_ids) == ("", ())


def generate_over_ranks(path: Path, layout: ParallelConfig) -> list[Completion]:
    mesh = ParallelMesh.create(layout)
    assert mesh is not None
    llm = LLM.from_checkpoint(path, mesh=mesh)
    return [*llm.generate(PROMPTS, RULES), *llm.generate(PROMPTS, ASKING)]


def sample_beside_padding(path: Path, filler: float) -> list[tuple[int, ...]]:
    """Samples of a model whose padding row of the head is filled with something loud."""
    mesh = ParallelMesh.create(ParallelConfig(tp=2))
    assert mesh is not None
    llm = LLM.from_checkpoint(path, mesh=mesh)
    weight = llm.model.get_parameter("lm_head.weight").data
    assert weight.shape[0] == 129
    if mesh.tp.rank == 1:
        weight[-1] = filler
    params = [SamplingParams(max_tokens=6, temperature=t, seed=s) for s, t in enumerate((0, 2, 9))]
    return [c.token_ids for c in llm.generate(["hello"] * 3, params)]


@pytest.mark.parametrize("layout", [ParallelConfig(tp=2), ParallelConfig(dp=2)], ids=["tp", "dp"])
@pytest.mark.parametrize("dress", DRESSES)
def test_two_ranks_generate_the_tokens_of_one_process(
    ranks: RankPool, checkpoints: dict[str, Path], dress: str, layout: ParallelConfig
) -> None:
    llm = LLM.from_checkpoint(checkpoints[dress])
    alone = [*llm.generate(PROMPTS, RULES), *llm.generate(PROMPTS, ASKING)]
    for got in ranks.run(generate_over_ranks, 2, checkpoints[dress], layout):
        for one, expected in zip(got, alone, strict=True):
            assert one.token_ids == expected.token_ids
            assert one.text == expected.text
            assert one.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert one.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-4)
            for top, other in zip(one.top_logprobs, expected.top_logprobs, strict=True):
                assert dict(top) == pytest.approx(dict(other), abs=1e-4)


def test_padding_of_the_vocabulary_is_never_sampled(
    ranks: RankPool, checkpoints: dict[str, Path]
) -> None:
    """U24: 257 tokens over tp 2 are padded to 258; the last may have any logit.

    Whatever the hidden state, one sign of the filler makes its logit the largest of all.
    """
    expected, *_ = ranks.run(sample_beside_padding, 2, checkpoints["llama"], 0.0)
    for filler in (1e4, -1e4):
        for got in ranks.run(sample_beside_padding, 2, checkpoints["llama"], filler):
            assert got == expected


def test_the_newest_checkpoint_of_a_folder_is_taken(tmp_path: Path) -> None:
    old, new = build_model(LLAMA, key=RngKey(1)), build_model(LLAMA, key=RngKey(2))
    first = save_checkpoint(old, tmp_path / "all", step=5)
    save_checkpoint(new, tmp_path / "all", step=10)
    newest = LLM.from_checkpoint(tmp_path / "all").model
    assert all(map(torch.equal, newest.state_dict().values(), new.state_dict().values()))
    load_weights(newest, first)
    assert all(map(torch.equal, newest.state_dict().values(), old.state_dict().values()))


def test_weights_are_converted_to_the_dtype_asked_for(checkpoints: dict[str, Path]) -> None:
    llm = LLM.from_checkpoint(checkpoints["llama"], dtype=torch.bfloat16)
    assert {p.dtype for p in llm.model.parameters()} == {torch.bfloat16}
    done = llm.generate("hello", SamplingParams(max_tokens=4, temperature=1.0))[0]
    assert len(done.token_ids) == 4


def test_prompts_may_be_text_or_tokens(checkpoints: dict[str, Path]) -> None:
    llm = LLM.from_checkpoint(checkpoints["llama"])
    text, tokens = llm.generate(["hello", list(b"hello")], RULES[0])
    (alone,) = llm.generate("hello", RULES[0])
    assert text.prompt == tokens.prompt == "hello"
    assert text.token_ids == tokens.token_ids == alone.token_ids
    assert text.text == tokens.text == alone.text
    assert llm.generate([]) == []
    assert llm.generate("hello")[0].token_ids[:3] == alone.token_ids[:3]
    with pytest.raises(ValueError, match="a prompt of tokens is a list in the list"):
        llm.generate([104, 105])  # type: ignore[list-item]
    message = "2 prompts and 3 sampling parameters: give one, or one each"
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], RULES[:3])


def test_stop_strings_samples_and_probabilities_come_with_the_completion(
    checkpoints: dict[str, Path],
) -> None:
    llm = LLM.from_checkpoint(checkpoints["gpt2"])
    plain = llm.generate("hello", SamplingParams(max_tokens=12))[0]
    stop = plain.text[4:6]
    done = llm.generate("hello", SamplingParams(max_tokens=12, stop=[stop, "never"]))[0]
    assert (done.text, done.finish_reason) == (plain.text[: plain.text.index(stop)], "stop")
    assert done.token_ids == plain.token_ids[: len(done.token_ids)]
    assert (done.top_logprobs, done.prompt_logprobs, done.prompt_top_logprobs) == ((), (), ())
    one, two = llm.generate(["hello", "h"], ASKING)
    assert (len(one.prompt_logprobs), one.prompt_logprobs[0]) == (5, None)
    assert (len(one.prompt_top_logprobs), one.prompt_top_logprobs[0]) == (5, ())
    assert two.prompt_logprobs == (None,)
    assert [len(top) for top in one.top_logprobs] == [2] * len(one.token_ids)
    rule = SamplingParams(max_tokens=6, temperature=1.5, n=3, seed=5)
    samples = llm.generate(["a", "b"], [rule, SamplingParams(max_tokens=1)])
    assert [done.prompt for done in samples] == ["a", "a", "a", "b"]
    assert len({done.token_ids for done in samples}) == 4
    assert samples[:3] == llm.generate(["a"] * 3, list(rule.each()))
    for wrong in ([1.5], None):
        with pytest.raises(ValueError, match="a prompt is a text or a list of tokens: "):
            llm.generate([wrong])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="prompt 2 of 2: the prompt is empty"):
        llm.generate(["a", ""], rule)


def test_a_turn_of_the_checkpoints_template_ends_a_text(tmp_path: Path) -> None:
    model = build_model(LLAMA, key=RngKey(3))
    step = save_checkpoint(model, tmp_path / "all")
    plain = LLM.from_checkpoint(step).generate("hello", SamplingParams(max_tokens=5))[0]
    third = plain.token_ids[2]
    ByteTokenizer().save(tmp_path / "own")
    config = tmp_path / "own" / "tokenizer_config.json"
    special = {str(third): {"content": "<end>", "special": True}}
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}<end>{% endfor %}"
    declared = {**json.loads(config.read_text()), "added_tokens_decoder": special}
    config.write_text(json.dumps({**declared, "chat_template": template}))
    llm = LLM.from_checkpoint(step, tokenizer=tmp_path / "own")
    assert llm.end_ids == {256, third}
    done = llm.generate("hello", SamplingParams(max_tokens=5))[0]
    assert (done.token_ids, done.finish_reason) == (plain.token_ids[:3], "stop")
    (tmp_path / "other").write_text("{{ messages[0].content }}")
    other = LLM.from_checkpoint(step, tokenizer=tmp_path / "own", chat_template=tmp_path / "other")
    assert other.end_ids == {256}
    assert LLM.from_checkpoint(step).chat_template.render([{"role": "user", "content": "x"}])


def test_the_tokenizers_end_token_ends_the_text() -> None:
    model = build_model(LLAMA, key=RngKey(3))
    eos = ByteTokenizer().eos_id
    assert eos == 256
    first = LLM(model, ByteTokenizer()).generate("hello", SamplingParams(max_tokens=5))[0]
    # From now on the end token is what the model says in the third place.
    head = model.get_parameter("lm_head.weight").data
    third = first.token_ids[2]
    assert third not in first.token_ids[:2]
    head[[eos, third]] = head[[third, eos]]
    llm = LLM(model, ByteTokenizer())
    done = llm.generate("hello", SamplingParams(max_tokens=5))[0]
    assert done.token_ids == (*first.token_ids[:2], eos)
    text = ByteTokenizer().decode([*b"hello", *first.token_ids[:2]])[5:]
    assert done.text == without_cut_character(text)
    assert done.finish_reason == "stop"
    on = llm.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert (len(on.token_ids), on.finish_reason) == (5, "length")


def test_ids_beyond_the_tokenizers_are_never_sampled() -> None:
    """A model may have more rows than its tokenizer ids: what they mean nobody could decode."""
    config = replace(LLAMA, vocab_size=4096)
    llm = LLM(build_model(config), ByteTokenizer())
    params = [SamplingParams(max_tokens=9, temperature=t, ignore_eos=True) for t in (0.0, 5.0)]
    for done in llm.generate(["hello", "hi"], params):
        assert len(done.token_ids) == 9
        assert max(done.token_ids) < 257


def test_a_checkpoint_without_tokenizer_takes_one_that_is_given(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    step = save_checkpoint(build_model(GPT2, key=RngKey(3)), tmp_path / "all", tokenizer=False)
    with pytest.raises(ValueError, match=f"^{re.escape(str(step))} has no tokenizer in it: give"):
        LLM.from_checkpoint(tmp_path / "all")
    expected = LLM.from_checkpoint(checkpoints["gpt2"]).generate(PROMPTS, RULES)
    ByteTokenizer().save(tmp_path / "elsewhere")
    for given in ("byte", tmp_path / "elsewhere", ByteTokenizer()):
        llm = LLM.from_checkpoint(step, tokenizer=given)
        assert llm.generate(PROMPTS, RULES) == expected


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    config = replace(LLAMA, vocab_size=100)
    with pytest.raises(ValueError, match="the tokenizer has 257 ids and the model only 100 rows"):
        LLM(build_model(config), ByteTokenizer())


def test_folders_that_are_no_checkpoint_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no committed checkpoint at .*/nothing or"):
        LLM.from_checkpoint(tmp_path / "nothing")
    model = build_model(GPT2)
    bare = save_checkpoint(model, tmp_path / "bare", state={})
    with pytest.raises(ValueError, match=r"has no model architecture in it: no 'config'$"):
        LLM.from_checkpoint(bare)
    tree = {"config": {"model": {**asdict(GPT2), "colour": "red"}}}
    odd = save_checkpoint(model, tmp_path / "odd", state=tree)
    with pytest.raises(ValueError, match=r"its model architecture cannot be built: .*'colour'$"):
        LLM.from_checkpoint(odd)
    tree = {"config": {"model": {**asdict(GPT2), "hidden_size": 64}}}
    wrong = save_checkpoint(model, tmp_path / "wrong", state=tree)
    with pytest.raises(ValueError, match=r"model/embedding\.weight"):
        LLM.from_checkpoint(wrong)
    (bare / "manifest.json").write_text("{}")
    with pytest.raises(mcore_ckpt.CheckpointError, match="is damaged"):
        LLM.from_checkpoint(bare)


def errors_over_ranks(path: Path) -> str:
    mesh = ParallelMesh.create(ParallelConfig(tp=2))
    assert mesh is not None
    with pytest.raises(FileNotFoundError) as caught:
        LLM.from_checkpoint(path, mesh=mesh)
    return str(caught.value)


def test_every_rank_gets_the_error(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(errors_over_ranks, 2, tmp_path)
    assert one == other
    assert "no committed checkpoint" in one


def test_a_damaged_copy_of_weights_is_an_error(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints["gpt2"], copy)
    (array,) = copy.glob("*/model/final_norm.weight")
    for chunk in array.rglob("*"):
        if chunk.is_file() and chunk.name != "zarr.json":
            chunk.unlink()
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"final_norm\.weight"):
        LLM.from_checkpoint(copy)
