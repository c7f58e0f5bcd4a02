"""Folders whose weights are in 8-bit blocks with a scale each: read, written plain, or refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_ckpt.hf import HFFolder, SafetensorsFolder, load_hf, save_hf
from mcore_models import GPT, build_model
from mcore_models.hf import ARCHITECTURES
from mcore_models.hf.blocks import decode
from mcore_parallel import Group

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

sys.path.append(str(Path(__file__).parent))
import folders  # noqa: E402
from families import random_model  # noqa: E402
from over_ranks import tensors_of  # noqa: E402

TOKENS = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))
FORM = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
SIZES = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 8},
}


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def loaded(folder: Path) -> GPT:
    model = build_model(HFFolder.open(folder, known=ARCHITECTURES).model, key=None).eval()
    tensors = tensors_of(model, "model/")
    load_hf(folder, tensors, Group.single(), prefix="model/", known=ARCHITECTURES)
    return model


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit numbers and the scale of each block of 128 x 128, block by block."""
    rows, columns = weight.shape
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scales[i, j] = weight[block].abs().max() / 448
            numbers[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return numbers, scales


def test_blocks_at_the_edges_are_decoded_by_their_own_scale() -> None:
    weight = torch.randn(300, 150, generator=torch.Generator().manual_seed(0))
    weight[256:] *= 100
    numbers, scales = quantise(weight)
    (decoded,) = decode([numbers, scales])
    assert decoded.dtype == torch.bfloat16
    assert (decoded.float() - weight).abs().max() <= 0.07 * weight.abs().max()
    assert (decoded[:256].float() - weight[:256]).norm() < 0.05 * weight[:256].norm()


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3", "qwen3-moe"])
def test_a_folder_in_8_bit_blocks_is_read_and_written_plain(tmp_path: Path, family: str) -> None:
    source = folders.save(random_model(family), tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    plain = {}
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name], scales = quantise(tensors[name])
        tensors[name.removesuffix("weight") + "weight_scale_inv"] = scales
        plain[name] = decode([tensors[name], scales])[0]
    save_file(tensors, source / "model.safetensors")
    change_config(source, quantization_config={**FORM, "activation_scheme": "dynamic"})
    model = loaded(source)
    found = {f.name: view for local in tensors_of(model).values() for f, view in local.views()}
    o = found["layers.1.attention.o.weight"]
    assert torch.equal(o, plain["model.layers.1.self_attn.o_proj.weight"].float())
    opened = HFFolder.open(source, known=ARCHITECTURES)
    out = save_hf(
        tmp_path / "out",
        tensors_of(model),
        architecture=opened.architecture,
        model=opened.model,
        base_config=opened.config,
    )
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert not [name for name in SafetensorsFolder(out) if "scale" in name]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        expected = theirs(TOKENS, use_cache=False).logits
        found_logits = model(TOKENS)
    assert (found_logits - expected).norm() < 1e-4 * expected.norm()


def test_other_forms_and_damaged_scales_are_refused(tmp_path: Path) -> None:
    source = folders.save(random_model("deepseek-v3"), tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name], scales = quantise(tensors[name])
    tensors[f"{name}_scale_inv"] = torch.cat([scales, scales])
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"down_proj.weight_scale_inv has shape \[2, 1\].* \[1, 1\]"
    ):
        loaded(source)
    for form, message in [
        ({"quant_method": "gptq"}, "only fp8 blocks are"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"only \[128, 128\] is"),
    ]:
        change_config(source, quantization_config=form)
        with pytest.raises(ValueError, match=message):
            HFFolder.open(source, known=ARCHITECTURES)


@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "Qwen3NextForCausalLM"])
def test_what_stays_unwritten(kind: str) -> None:
    """A config that says how weights were stored is read, and written without."""
    known = ARCHITECTURES[kind]
    model = known.read_config({**SIZES, "quantization_config": FORM})
    assert model == known.read_config(SIZES)
    assert "quantization_config" not in known.write_config(
        model, {**SIZES, "quantization_config": FORM}
    )
    with pytest.raises(ValueError, match="only fp8 blocks are"):
        known.read_config({**SIZES, "quantization_config": {"quant_method": "awq"}})


def test_where_weights_have_no_blocks_they_are_plain() -> None:
    with pytest.raises(ValueError, match=r"quantization_config=.* is not supported: only None is"):
        ARCHITECTURES["LlamaForCausalLM"].read_config({**SIZES, "quantization_config": FORM})
