"""Folders of T5, of both versions, against transformers: values, gradients, and back."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_ckpt.hf import HFFolder, SafetensorsFolder, load_hf, save_hf
from mcore_inference import Engine, ModelRunner, Request, SamplingParams
from mcore_models import T5, count_parameters
from mcore_models.hf import ARCHITECTURES, differences
from mcore_models.t5 import paired_batch
from mcore_parallel import ParallelConfig, all_gather_object
from mcore_parallel.tensor import gather_logits
from mcore_parallel.testing import RankPool

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
from over_ranks import build, tensors_of  # noqa: E402

SIZES = {
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
}
VERSIONS: dict[str, dict[str, Any]] = {
    "1.0": {},
    "1.1": {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "num_decoder_layers": 3,
    },
}
GENERATOR = torch.Generator().manual_seed(1)
SOURCE = torch.randint(100, (2, 20), generator=GENERATOR)
TOKENS = torch.randint(100, (2, 16), generator=GENERATOR)
READ, WRITTEN = torch.tensor([20, 13]), torch.tensor([11, 16])
MASK = torch.arange(20) < READ[:, None]
SHOWN = torch.arange(16) < WRITTEN[:, None]

all_versions = pytest.mark.parametrize("version", VERSIONS)


def random_model(version: str) -> Any:
    """Theirs; of 1.1 with a head of its own, as its weights have one."""
    torch.manual_seed(0)
    config = transformers.T5Config(**{**SIZES, **VERSIONS[version]})
    model = transformers.T5ForConditionalGeneration(config).eval()
    if version == "1.1":
        model.lm_head.weight = nn.Parameter(torch.empty(100, 32))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def saved(version: str, folder: Path, model: Any = None) -> Path:
    """A folder such as those of the releases, whose config says whether the head is tied."""
    (random_model(version) if model is None else model).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["scale_decoder_outputs"]
    config["tie_word_embeddings"] = version == "1.0"
    (folder / "config.json").write_text(json.dumps(config))
    assert ("lm_head.weight" in SafetensorsFolder(folder)) == (version == "1.1")
    return folder


def loaded(folder: Path, layout: ParallelConfig | None = None) -> T5:
    opened = HFFolder.open(folder, known=ARCHITECTURES)
    model = build(opened.model, layout or ParallelConfig(), torch.float32, 0).eval()
    tensors, world = tensors_of(model, "model/"), model.mesh.world
    load_hf(folder, tensors, world, prefix="model/", known=ARCHITECTURES)
    assert isinstance(model, T5)
    return model


def theirs_of(model: Any) -> Tensor:
    out = model(input_ids=SOURCE, attention_mask=MASK.long(), decoder_input_ids=TOKENS)
    logits: Tensor = out.logits[SHOWN]
    return logits


@all_versions
def test_logits_and_gradients(tmp_path: Path, version: str) -> None:
    """Those of transformers; theirs are named by saving a model that has them for weights."""
    model = random_model(version)
    ours = loaded(saved(version, tmp_path / "hf"))
    total = sum(p.numel() for p in model.parameters())
    assert count_parameters(ours.config).total == total
    found = ours(TOKENS, source=SOURCE, lengths=WRITTEN, source_lengths=READ)[SHOWN]
    expected = theirs_of(model)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    direction = torch.randn_like(expected)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    wanted = dict(loaded(saved(version, tmp_path / "gradients", model)).named_parameters())
    size = torch.stack([value.norm() for value in wanted.values()]).norm()
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None, key
        distance = (parameter.grad - wanted[key]).norm()
        assert distance < 1e-3 * max(wanted[key].norm(), 1e-3 * size), key
    with torch.no_grad():  # whole samples take another way through attention
        whole = model(input_ids=SOURCE, decoder_input_ids=TOKENS).logits
        again = loaded(tmp_path / "gradients")(TOKENS, source=SOURCE)
    assert (whole - again).norm() < 1e-4 * whole.norm()


@all_versions
def test_it_writes_what_theirs_writes(tmp_path: Path, version: str) -> None:
    """Greedy, two sources of different lengths together, past what would end a text.

    Theirs without its cache, which takes both stacks for equally high.
    """
    model = random_model(version)
    sources = [row[:size].tolist() for row, size in zip(SOURCE, READ.tolist(), strict=True)]
    rule = SamplingParams(max_tokens=16, temperature=0)
    asked = [Request(prompt=tuple(source), params=rule) for source in sources]
    Engine(ModelRunner(loaded(saved(version, tmp_path)))).run(asked)
    for source, request in zip(sources, asked, strict=True):
        found = model.generate(
            torch.tensor([source]),
            max_new_tokens=16,
            do_sample=False,
            decoder_start_token_id=0,
            eos_token_id=-1,
            use_cache=False,
        )
        assert request.tokens == found[0, 1:].tolist()
        assert len(request.tokens) == 16


@all_versions
def test_the_config_in_their_words_and_in_ours(tmp_path: Path, version: str) -> None:
    opened = HFFolder.open(saved(version, tmp_path), known=ARCHITECTURES)
    architecture, model = opened.architecture, opened.model
    assert architecture.write_config(model, opened.config) == opened.config
    assert architecture.from_tree(json.loads(json.dumps(architecture.to_tree(model)))) == model
    written = architecture.write_config(model)
    assert written["tie_word_embeddings"] is (version == "1.0")
    same = transformers.T5Config(**written).to_dict()
    # Theirs says of every model that it is tied, and beside it whether outputs are scaled.
    assert same["scale_decoder_outputs"] is (version == "1.0")
    names = [name for name, _, _ in differences(architecture.read_config(same), model)]
    assert names == ([] if version == "1.0" else ["tied_embeddings"])
    both_alike = {name: value for name, value in same.items() if name != "num_decoder_layers"}
    found = differences(architecture.read_config(both_alike), architecture.read_config(same))
    assert [name for name, _, _ in found] == ([] if version == "1.0" else ["t5.num_decoder_layers"])
    for field in ({"is_encoder_decoder": False}, {"feed_forward_proj": "gated-silu"}):
        with pytest.raises(ValueError, match=next(iter(field))):
            architecture.read_config({**opened.config, **field})


def over_ranks(folder: Path, out: Path, layout: ParallelConfig) -> Tensor | None:
    """Load over any layout and export; the logits, of the last stage."""
    opened, model = HFFolder.open(folder, known=ARCHITECTURES), loaded(folder, layout)
    save_hf(
        out,
        tensors_of(model),
        model.mesh.world,
        architecture=opened.architecture,
        model=opened.model,
        base_config=opened.config,
        files=opened.files(),
    )
    batch, hidden = paired_batch(TOKENS, SOURCE, lengths=WRITTEN, source_lengths=READ), None
    mesh = model.mesh
    with torch.no_grad():
        for stage in range(mesh.pp.size):
            output = model.stage_forward(batch, hidden) if stage == mesh.pp.rank else None
            passed = all_gather_object(output, mesh.pp)[stage]
            hidden = passed if stage + 1 == mesh.pp.rank else hidden
    if not model.is_last:
        return None
    assert passed is not None
    return gather_logits(passed, mesh.tp, vocab_size=100).view(2, 16, -1)[SHOWN]


@all_versions
@pytest.mark.parametrize("layout", ["tp=2,pp=2", "tp=4,sp"])
def test_in_over_ranks_and_out_again(
    ranks: RankPool, tmp_path: Path, version: str, layout: str
) -> None:
    """Tensors cut over ranks and stages give the same logits, and go back bit for bit."""
    folder, out = saved(version, tmp_path / "hf"), tmp_path / "out"
    parallel = ParallelConfig.parse(layout)
    expected = theirs_of(random_model(version))
    results = ranks.run(over_ranks, parallel.model_size, folder, out, parallel)
    last = [found for found in results if found is not None]
    assert len(last) == parallel.tp
    for found in last:
        assert (found - expected).norm() < 1e-4 * expected.norm()
    back, original = SafetensorsFolder(out), SafetensorsFolder(folder)
    assert set(back) == set(original)
    for key in original:
        assert torch.equal(back.read(key), original.read(key)), key
    written = json.loads((out / "config.json").read_text())
    assert written == json.loads((folder / "config.json").read_text())
