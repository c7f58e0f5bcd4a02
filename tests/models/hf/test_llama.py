"""LLaMA folders against transformers: in over any layout, out again, bit for bit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_ckpt
from mcore_ckpt.convert import convert
from mcore_ckpt.hf import SafetensorsFolder
from mcore_models import ModelConfig
from mcore_models.hf import LLAMA
from mcore_parallel import ParallelConfig
from mcore_parallel.testing import RankPool

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
import folders  # noqa: E402
from over_ranks import import_and_export  # noqa: E402

TOKENS = torch.randint(100, (2, 24), generator=torch.Generator().manual_seed(1))
TP2 = ParallelConfig(tp=2)
SHARDED = {"max_shard_size": "40KB"}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(TOKENS).logits
    return result


def assert_same_folder(out: Path, source: Path) -> None:
    """Tensors bit for bit, the same config for transformers, the tokenizer's files."""
    ours, theirs = SafetensorsFolder(out), SafetensorsFolder(source)
    assert set(ours) == set(theirs)
    for name in theirs:
        a, b = ours.read(name), theirs.read(name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)), name
    assert_same_config(out, source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    original = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    assert torch.equal(logits(loaded), logits(original))
    assert transformers.AutoTokenizer.from_pretrained(out)("word1")["input_ids"] == [1, 74]


def assert_same_config(out: Path, source: Path) -> None:
    def config(folder: Path) -> dict[str, Any]:
        read: dict[str, Any] = transformers.AutoConfig.from_pretrained(folder).to_dict()
        return {k: v for k, v in read.items() if k not in ("_name_or_path", "transformers_version")}

    assert config(out) == config(source)


@pytest.mark.parametrize(
    ("fields", "dtype", "options"),
    [
        ({}, torch.float32, {}),
        ({"tie_word_embeddings": True}, torch.float32, SHARDED),
        ({"attention_bias": True, "mlp_bias": True}, torch.bfloat16, SHARDED),
        ({"tie_word_embeddings": True, "head_dim": 8}, torch.bfloat16, {}),
    ],
    ids=["plain", "tied, sharded", "biases, bf16, sharded", "tied, odd heads, bf16"],
)
def test_in_over_tp_2_and_out_again(
    ranks: RankPool,
    tmp_path: Path,
    fields: dict[str, Any],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    """U50: config vocabulary 100, tokenizer 97, 128 rows at tp 2; out comes 100 x h, bitwise."""
    model = folders.llama(**fields)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    source = folders.save(model, tmp_path / "hf", dtype=dtype, **options)
    assert len(list(source.glob("*.safetensors"))) > (3 if options else 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = logits(model)
    out = tmp_path / "out"
    results = ranks.run(import_and_export, 2, source, out, TOKENS, TP2, dtype, 64)
    size = dtype.itemsize
    total = 0
    for result in results:
        assert result["rows"] == 64
        # Every byte of a rank's tensors but the padding was read, once, and none besides.
        padding = (128 - 100) * 64 * size * (1 if model.config.tie_word_embeddings else 2)
        read = sum(result["read"].values())
        assert read == result["held"] - (padding if result is results[1] else 0)
        total += read
        assert (result["logits"] - expected).abs().max() < 1e-4
    folder_bytes = sum(p.numel() for p in model.parameters()) * size
    norms = 7 * 64 * size  # held by both, as are the biases after a sum
    after_sums = 3 * 2 * 64 * size if fields.get("attention_bias") else 0
    assert total == folder_bytes + norms + after_sums
    assert SafetensorsFolder(out).meta("model.embed_tokens.weight").shape == (100, 64)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 100
    assert_same_folder(out, source)
    assert json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(transformers.AutoTokenizer.from_pretrained(out)) == folders.TOKENS


def test_from_the_checkpoint_of_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """The same from disk: a checkpoint that tp 2 saved, converted by one process."""
    source = folders.save(folders.llama(), tmp_path / "hf")
    out = tmp_path / "out"
    ranks.run(import_and_export, 2, source, out, TOKENS, TP2)
    convert(("native", tmp_path / "out_native"), ("hf", tmp_path / "back"))
    ours, theirs = SafetensorsFolder(tmp_path / "back"), SafetensorsFolder(source)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    original = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(logits(loaded), logits(original))


def test_four_heads_two_groups_four_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """U51: each kv head lies on two ranks; logits are those of one process, out it is bitwise, both
    straight from the ranks and from the checkpoint that they saved."""
    source = folders.save(folders.llama(), tmp_path / "hf")
    alone = import_alone(ranks, source, tmp_path / "alone")
    tp4 = ParallelConfig(tp=4)
    for result in ranks.run(import_and_export, 4, source, tmp_path / "out", TOKENS, tp4):
        assert (result["logits"] - alone).abs().max() < 1e-4
    assert_same_folder(tmp_path / "out", source)
    convert(("native", tmp_path / "out_native"), ("hf", tmp_path / "back"))  # its checkpoint
    ours, theirs = SafetensorsFolder(tmp_path / "back"), SafetensorsFolder(source)
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs)
    assert (alone - logits(folders.llama())).abs().max() < 1e-4


def import_alone(ranks: RankPool, source: Path, out: Path) -> Tensor:
    result: Tensor = ranks.run(import_and_export, 1, source, out, TOKENS, ParallelConfig())[0][
        "logits"
    ]
    return result


def test_pipeline_stages_read_their_own_layers(ranks: RankPool, tmp_path: Path) -> None:
    """Tied embeddings on two stages: one tensor, written once."""
    source = folders.save(folders.llama(tie_word_embeddings=True), tmp_path / "hf")
    layout = ParallelConfig(pp=2, tp=2)
    results = ranks.run(import_and_export, 4, source, tmp_path / "out", TOKENS, layout)
    first, last = results[0]["read"], results[-1]["read"]
    assert "model.layers.0.mlp.up_proj.weight" in first
    assert "model.layers.0.mlp.up_proj.weight" not in last
    assert "model.layers.2.mlp.up_proj.weight" not in first
    assert first["model.embed_tokens.weight"] == last["model.embed_tokens.weight"] > 0
    assert_same_folder(tmp_path / "out", source)


def test_the_command_and_the_entry_point(tmp_path: Path) -> None:
    """As installed: mcore-models has registered LLaMA with mcore-ckpt."""
    from mcore_ckpt.cli import main

    source = folders.save(folders.llama(), tmp_path / "hf", dtype=torch.bfloat16, **SHARDED)
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert main(["convert", "--from", "hf", str(source), "--to", "native", run]) == 0
    assert main(["convert", "--from", "native", run, "--to", "hf", out]) == 0
    assert_same_folder(Path(out), source)
    assert (Path(out) / "config.json").read_text() == (source / "config.json").read_text().rstrip(
        "\n"
    ) + "\n"
    state = mcore_ckpt.read_state(run)
    assert LLAMA.from_tree(state["config"]["model"]) == LLAMA.read_config(
        json.loads((source / "config.json").read_text())
    )


def test_names_of_older_folders(ranks: RankPool, tmp_path: Path) -> None:
    """Rotary frequencies and a tied head that is stored all the same say nothing new."""
    from safetensors.torch import load_file, save_file

    source = folders.save(folders.llama(tie_word_embeddings=True), tmp_path / "hf")
    expected = import_alone(ranks, source, tmp_path / "a")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, source / "model.safetensors")
    assert torch.equal(import_alone(ranks, source, tmp_path / "b"), expected)
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, source / "model.safetensors")
    message = r"lm_head\.weight must equal model\.embed_tokens\.weight, which it is tied to"
    with pytest.raises(ValueError, match=message):
        import_alone(ranks, source, tmp_path / "c")


def test_shapes_are_those_of_the_model() -> None:
    config = ModelConfig(vocab_size=9, hidden_size=8, num_layers=2, num_heads=2, norm_eps=1e-6)
    shapes = LLAMA.shapes(config)
    assert shapes["layers.1.mlp.down.weight"] == (8, 64)
    assert shapes["lm_head.weight"] == (9, 8)
    assert len(shapes) == 3 + 2 * 9
