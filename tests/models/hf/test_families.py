"""Folders of every decoder architecture against transformers: values, gradients, and back."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.hf import HFFolder, SafetensorsFolder, load_hf
from mcore_inference import LLM, SamplingParams
from mcore_models import GPT, ModelConfig, build_model, count_parameters
from mcore_models.hf import ARCHITECTURES, differences
from mcore_parallel import Group, ParallelConfig
from mcore_parallel.testing import RankPool

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
import folders  # noqa: E402
from families import FAMILIES, config_class, random_model  # noqa: E402
from over_ranks import logits_and_export, tensors_of  # noqa: E402

TOKENS = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))
Source = Callable[[str], Path]

all_families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Folders of the small models, each made when it is first asked for."""
    root = tmp_path_factory.mktemp("families")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            folders.save(random_model(family), root / family)
        return root / family

    return folder


def loaded(folder: Path, config: ModelConfig) -> GPT:
    model = build_model(config, key=None).eval()
    tensors = tensors_of(model, "model/")
    load_hf(folder, tensors, Group.single(), prefix="model/", known=ARCHITECTURES)
    return model


@all_families
def test_logits_and_gradients(source: Source, tmp_path: Path, family: str) -> None:
    """Those of transformers; theirs are named by saving a model that has them for weights."""
    config = HFFolder.open(source(family), known=ARCHITECTURES).model
    ours, theirs = loaded(source(family), config), random_model(family)
    found, expected = ours(TOKENS), theirs(TOKENS, use_cache=False).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert count_parameters(config).total == sum(p.numel() for p in theirs.parameters())
    direction = torch.randn_like(expected)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    wanted = dict(loaded(tmp_path / "gradients", config).named_parameters())
    total = torch.stack([value.norm() for value in wanted.values()]).norm()
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            distance = (parameter.grad - wanted[name]).norm()
            assert distance < 1e-3 * max(wanted[name].norm(), 1e-3 * total), name


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3", "granite"])
def test_embeddings_in_16_bits_are_scaled_as_theirs(source: Source, family: str) -> None:
    """By a factor that is rounded as well: that of Gemma, a root, is no number of 16 bits."""
    config = HFFolder.open(source(family), known=ARCHITECTURES).model
    ours = loaded(source(family), config).to(torch.bfloat16)
    theirs: Any = random_model(family).to(torch.bfloat16)
    theirs_first = theirs.model.embed_tokens(TOKENS) * getattr(
        theirs.model, "embedding_multiplier", 1
    )
    found: list[torch.Tensor] = []
    ours.blocks[0].register_forward_pre_hook(lambda _, args: found.append(args[0].settled()))
    ours(TOKENS)
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(found[0], theirs_first.flatten(0, 1))


@all_families
def test_the_config_in_their_words_and_in_ours(source: Source, family: str) -> None:
    """As it was beside an earlier one; without one it is the same model to transformers."""
    opened = HFFolder.open(source(family), known=ARCHITECTURES)
    architecture, model = opened.architecture, opened.model
    assert architecture.write_config(model, opened.config) == opened.config
    assert architecture.from_tree(json.loads(json.dumps(architecture.to_tree(model)))) == model
    written = json.loads(json.dumps(architecture.write_config(model)))
    config = config_class(family)(**written).to_dict()
    assert not list(differences(architecture.read_config(config), model))
    same = config_class(family)(**FAMILIES[family][1]).to_dict()
    for name in ("layer_types", "sliding_window", "mlp_only_layers"):
        assert config.get(name) == same.get(name)
    # It may say more, such as a factor that follows from lengths.
    assert (same.get("rope_parameters") or {}).items() <= (
        config.get("rope_parameters") or {}
    ).items()


@pytest.mark.parametrize("name", sorted({kind for kind, _ in FAMILIES.values()}))
def test_absent_fields_are_those_of_transformers(name: str) -> None:
    """Of a config that says its sizes alone."""
    family = next(family for family, (kind, _) in FAMILIES.items() if kind == name)
    needed = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"}
    needed |= {"intermediate_size", "n_embd", "n_layer", "n_head"}
    sizes = {name: value for name, value in FAMILIES[family][1].items() if name in needed}
    heads = {name: 32 for name in sizes if "head" in name}  # as many as kv heads at least
    sizes |= {**heads, **{name: 256 for name in sizes if name in ("hidden_size", "n_embd")}}
    full = config_class(family)(**sizes).to_dict()
    (architecture,) = [
        known for known in ARCHITECTURES.values() if known.model_type == full["model_type"]
    ]
    assert not list(differences(architecture.read_config(sizes), architecture.read_config(full)))


@all_families
def test_probabilities_of_dropout_say_nothing(family: str) -> None:
    """StarCoder2 and Granite 3.0 were published with some: they matter to training alone."""
    full = config_class(family)(**FAMILIES[family][1]).to_dict()
    (architecture,) = [a for a in ARCHITECTURES.values() if a.model_type == full["model_type"]]
    names = {name for name in full if "dropout" in name or "pdrop" in name}
    assert names
    published = {**full, **dict.fromkeys(names, 0.1), "architectures": [architecture.name]}
    model = architecture.read_config(published)
    assert model == architecture.read_config(full)
    assert architecture.write_config(model, published) == published
    changed = architecture.write_config(replace(model, vocab_size=7), published)
    assert {name: changed[name] for name in names} == dict.fromkeys(names, 0.1)


@all_families
def test_in_over_ranks_and_out_again(
    ranks: RankPool, source: Source, tmp_path: Path, family: str
) -> None:
    """U50, U51: tensors cut over ranks and stages give the same logits, and go back bitwise."""
    experts = HFFolder.open(source(family), known=ARCHITECTURES).model.moe is not None
    layout = ParallelConfig.parse("tp=2,pp=2,ep=2,etp=1" if experts else "tp=2,pp=2")
    out = tmp_path / "out"
    results = ranks.run(logits_and_export, 4, source(family), out, TOKENS, layout)
    with torch.no_grad():
        expected = random_model(family)(TOKENS, use_cache=False).logits
    found = [logits for logits in results if logits is not None]
    assert len(found) == 2
    for logits in found:
        assert (logits - expected).norm() < 1e-4 * expected.norm()
    back, original = SafetensorsFolder(out), SafetensorsFolder(source(family))
    assert set(back) == set(original)
    for name in original:
        a, b = back.read(name), original.read(name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name
    config = json.loads((out / "config.json").read_text())
    assert config == json.loads((source(family) / "config.json").read_text())


@all_families
def test_what_it_generates(source: Source, family: str) -> None:
    """Greedily with a cache, past the windows: the tokens of transformers' own loop."""
    prompt = [1, *TOKENS[0, :6].tolist()]
    llm = LLM.from_hf(source(family))
    (completion,) = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    model: Any = random_model(family)
    model.generation_config.eos_token_id = None
    theirs = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=8,
        do_sample=False,
        suppress_tokens=list(range(folders.TOKENS, 100)),  # rows that the tokenizer has no use for
        output_scores=True,
        return_dict_in_generate=True,
    )
    for scores in theirs.scores:
        best = scores[0].topk(2).values
        assert best[0] - best[1] > 1e-4, "two tokens are nearly equal: a coin toss"
    expected = theirs.sequences[0, len(prompt) :].tolist()
    assert list(completion.token_ids) == expected
    assert len(expected) == 8
