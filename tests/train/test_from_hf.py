"""Training that starts from a Hugging Face folder, and the folder that comes of it."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.convert import convert
from mcore_ckpt.hf import HFFolder, SafetensorsFolder
from mcore_ckpt.sources import MappedSource, metas
from mcore_models.hf import LLAMA, MIXTRAL, differences
from mcore_parallel import ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.pretrain import pretrain
from mcore_train.session import build_session
from mcore_train.trainer import Trainer

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "models" / "hf"))
from toy import toy_tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    import folders

    return folders.save(folders.llama(), tmp_path_factory.mktemp("hf") / "model")


def tree(folder: Path, **fields: Any) -> dict[str, Any]:
    start = {"load": str(folder), "weights_only": True, **fields.pop("checkpoint", {})}
    made = toy_tree(checkpoint=start, data={"tokenizer": str(folder)}, **fields)
    made["model"] = {"hf": str(folder), "dropout": 0.1, **fields.get("model", {})}
    return made


def config(folder: Path, **fields: Any) -> TrainConfig:
    return config_from_tree(tree(folder, **fields))


def test_the_architecture_comes_from_the_folder(folder: Path, tmp_path: Path) -> None:
    made = config(folder)
    expected = LLAMA.read_config(json.loads((folder / "config.json").read_text()))
    assert asdict(made.model) == {**asdict(expected), "dropout": 0.1}
    assert config_from_tree(config_to_tree(made)) == made
    with pytest.raises(ValueError, match=r"has no config\.json: no Hugging Face model folder"):
        config_from_tree(toy_tree(model={"hf": str(tmp_path)}))
    with pytest.raises(ValueError, match=r"model\.preset and model\.hf: each says what"):
        config_from_tree(toy_tree(model={"hf": str(folder), "preset": "smollm2-135m"}))


def loaded(source: dict[str, Any]) -> dict[str, list[Any]]:
    """Load as a run does; return what this rank holds of every tensor, parameters and masters."""
    made = config_from_tree(source)
    mesh = ParallelMesh.create(made.parallel)
    assert mesh is not None
    session = build_session(made, mesh)
    trainer = Trainer(session)
    trainer.load()
    assert (trainer.step, trainer.resumed) == (0, False)
    session.optimizer.wait()
    held: dict[str, list[Any]] = {}
    for name, parameter in session.model.named_parameters():
        for fragment, view in session.model.specs()[name].layout.views(parameter.data):
            held.setdefault(fragment.name, []).append((fragment.box, view.clone()))
    for value in session.optimizer.state_tensors().values():
        for fragment, view in value.views():
            if fragment.name.startswith("model/"):
                held.setdefault(fragment.name, []).append((fragment.box, view.clone()))
            else:
                assert not view.any()
    session.close()
    return held


@pytest.mark.parametrize(
    ("layout", "precision"),
    [({"tp": 2}, "fp32"), ({"dp": 2}, "bf16"), ({"pp": 2}, "fp32")],
    ids=["tp", "sharded optimizer, bf16", "pp"],
)
def test_every_rank_starts_with_its_part_of_the_weights(
    ranks: RankPool, folder: Path, layout: dict[str, int], precision: str
) -> None:
    source = SafetensorsFolder(folder)
    model = LLAMA.read_config(json.loads((folder / "config.json").read_text()))
    names = {  # ours → theirs; LLaMA's operators only rename
        mapped.layout.names()[0]: theirs
        for theirs, mapped in LLAMA.mapping(model).inverse(shapes_of(model)).tensors.items()
    }
    seen = set()
    for held in ranks.run(loaded, 2, tree(folder, parallel=layout, precision=precision)):
        for name, parts in held.items():
            whole = source.read(names[name.removeprefix("model/")])
            seen.add(name)
            for box, value in parts:
                assert torch.equal(value, whole[box.slices].to(value.dtype)), name
                if name.startswith("model/"):
                    assert value.dtype == torch.float32
    assert seen == set(names) | {f"model/{name}" for name in names}


def test_experts_come_apart_into_the_slices_of_an_optimizer(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Functions of whole tensors, gates and values that alternate, into flat parts of them."""
    pytest.importorskip("transformers")
    import families
    import folders

    path = folders.save(families.random_model("gpt-oss"), tmp_path / "hf")
    opened = HFFolder.open(path)
    tensors = opened.tensors()
    source = MappedSource(tensors, opened.mapping.forward(metas(tensors)))
    seen = set()
    layout = {"dp": 2, "ep": 2}
    for held in ranks.run(loaded, 2, tree(path, parallel=layout, precision="bf16")):
        for name, parts in held.items():
            whole = source.read(name.removeprefix("model/"))
            seen.add(name.removeprefix("model/"))
            for box, value in parts:
                assert torch.equal(value, whole[box.slices].to(value.dtype)), name
    assert seen == set(source)


def shapes_of(model: Any) -> dict[str, Any]:
    from mcore_parallel.mapping import TensorMeta

    return {n: TensorMeta(shape, torch.float32) for n, shape in LLAMA.shapes(model).items()}


def test_what_was_trained_goes_back_into_a_folder(folder: Path, tmp_path: Path) -> None:
    """The tokenizer's files travel along, the folder's weights do not."""
    run = tmp_path / "run"
    made = config(folder, steps=2, checkpoint={"directory": str(run)})
    first = pretrain(made, nproc=1)
    assert (first.first_step, first.step) == (0, 2)
    opened = mcore_ckpt.open(run)
    files = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(opened.manifest.files) == {f"tokenizer/{name}" for name in files}
    convert(("native", run), ("hf", tmp_path / "out"))
    import transformers

    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    changes = [
        (a - b).norm() / b.norm()
        for a, b in zip(trained.parameters(), before.parameters(), strict=True)
    ]
    assert 0 < max(changes) < 0.2
    for name in ("bos", "eos"):
        assert getattr(trained.config, f"{name}_token_id") == {"bos": 1, "eos": 2}[name]
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "out")) == 97
    again = pretrain(config(folder, steps=3, checkpoint={"directory": str(run)}), nproc=1)
    assert (again.first_step, again.step) == (2, 3)  # its own checkpoint, not the folder


def test_what_training_adds_to_experts_is_not_of_the_folder(tmp_path: Path) -> None:
    """Balance losses of a run's own, and what routers remember for them, neither in nor out."""
    pytest.importorskip("transformers")
    import families
    import folders

    source = folders.save(families.random_model("mixtral"), tmp_path / "hf")
    run = tmp_path / "run"
    moe = {"aux_loss_scope": "global", "aux_loss_coefficient": 0.1, "z_loss_coefficient": 0.01}
    made = config(source, steps=2, model={"moe": moe}, checkpoint={"directory": str(run)})
    assert pretrain(made, nproc=1).step == 2
    assert mcore_ckpt.open(run).read("model/layers.0.moe.router.load").any()
    convert(("native", run), ("hf", tmp_path / "out"))
    back, original = SafetensorsFolder(tmp_path / "out"), SafetensorsFolder(source)
    assert set(back) == set(original)
    config_of = {f: json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "out")}
    ours, theirs = map(MIXTRAL.read_config, config_of.values())
    assert not list(differences(ours, theirs))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"checkpoint": {"weights_only": False}}, "weights alone: set checkpoint.weights_only"),
        (
            {"model": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32}},
            "has 4: use 4, or model",
        ),
        ({"model": {"rope_base": 1e4}}, "model.rope_base=10000.0, but"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pretrain(config(folder, **fields), nproc=1)
