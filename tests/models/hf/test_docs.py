"""The architecture that docs/huggingface.md adds in a few lines is one."""

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from mcore_ckpt.convert import convert
from mcore_ckpt.hf import SafetensorsFolder
from mcore_ckpt.hf.folder import TOKENIZER_FILES
from mcore_data import ByteTokenizer
from mcore_data.tokenizers import tokenizer_files
from mcore_inference import LLM, SamplingParams
from mcore_models import ModelConfig
from mcore_models.hf import LLAMA, Field, Only
from mcore_parallel import mapping

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
import folders  # noqa: E402

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "huggingface.md").read_text()


def test_the_architecture_of_the_page(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    qwen2 = names["QWEN2"]
    known = {"Qwen2ForCausalLM": qwen2}
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=48, initializer_range=0.3,
        )
    ).eval()  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    source = folders.save(model, tmp_path / "hf")
    llm = LLM.from_hf(source, tokenizer=ByteTokenizer(), architectures=known)  # type: ignore[dict-item]
    tokens = torch.randint(300, (2, 20))
    with torch.no_grad():
        assert (llm.model(tokens) - model(tokens).logits).abs().max() < 1e-4
    assert llm.generate("a", SamplingParams(max_tokens=3))[0].token_ids
    for name in ("native", "hf"):
        previous = ("hf", source) if name == "native" else ("native", tmp_path / "native")
        convert(previous, (name, tmp_path / ("native" if name == "native" else "out")), known=known)  # type: ignore[arg-type]
    ours, theirs = SafetensorsFolder(tmp_path / "out"), SafetensorsFolder(source)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is transformers.Qwen2ForCausalLM
    assert again.config.to_diff_dict() == model.config.to_diff_dict()


def test_both_sides_know_the_same_files_of_a_tokenizer(tmp_path: Path) -> None:
    """mcore-data reads them, mcore-ckpt carries them; neither sees the other."""
    for name in TOKENIZER_FILES:
        (tmp_path / name).write_text("")
    assert [path.name for path in tokenizer_files(tmp_path)] == list(TOKENIZER_FILES)


def test_the_page_names_every_field_and_operator() -> None:
    for rule in LLAMA.rules:
        if isinstance(rule, Field | Only):
            assert f"`{rule.theirs}`" in PAGE
        if isinstance(rule, Field):
            assert rule.ours in {field.name for field in fields(ModelConfig)}
    operators = [
        name
        for name in mapping.__all__
        if isinstance(getattr(mapping, name), type)
        and issubclass(getattr(mapping, name), mapping.Operator)
    ]
    for name in operators:
        assert name == "Operator" or f"`{name}(" in PAGE
