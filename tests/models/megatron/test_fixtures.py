"""Checkpoints that megatron-core 0.16.1 wrote: every weight and every moment, value by value."""

import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.convert import convert
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.megatron import MegatronCheckpoint
from mcore_models import ModelConfig, build_model

sys.path.append(str(Path(__file__).parent))
from megatron_truth import KNOWN, compare, places, read

FIXTURES = Path(__file__).parent / "fixtures"
CASES = {case["name"]: case for case in json.loads((FIXTURES / "cases.json").read_text())}


def unpack(name: str, folder: Path) -> Path:
    """Return the directory of a fixture's checkpoints."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_that_were_in_memory(name: str, tmp_path: Path) -> None:
    """U43 and its kind: optimizer state of any layout of theirs, whatever it was cut into."""
    case = CASES[name]
    found, tensors = read(unpack(name, tmp_path))
    assert found.format == case.get("format", "torch_dist")
    assert (found.iteration, found.optimizer_step, found.consumed_samples) == (2, 2, 4)
    assert set(tensors) == {"param", "exp_avg", "exp_avg_sq"}
    assert compare(tensors, places(tmp_path, name)) > 20
    config = ModelConfig(**found.model)
    model = build_model(config, device="meta", key=None)
    shapes = {f.name: f.global_shape for s in model.specs().values() for f in s.layout.fragments}
    assert {name: tuple(v.shape) for name, v in tensors["param"].items()} == shapes


def test_a_checkpoint_of_ours_has_the_same_values(tmp_path: Path) -> None:
    """One command: weights, moments and the number of steps; then our own reader."""
    import mcore_ckpt

    source = unpack("experts", tmp_path)
    _, tensors = read(source)
    done = convert(("auto", source), ("native", tmp_path / "run"))
    written = mcore_ckpt.open(tmp_path / "run")
    for kind, values in tensors.items():
        prefix = "model" if kind == "param" else kind
        for name, value in values.items():
            assert torch.equal(written[f"{prefix}/{name}"], value)
    assert done.num_tensors == len(written) == sum(map(len, tensors.values()))
    assert written.step == written.state["step"] == 2
    assert written.state["optimizer"] == {"step": 2, "state_names": ["exp_avg", "exp_avg_sq"]}
    assert written.state["config"]["optimizer"] == {"kind": "adamw"}


def test_weights_go_to_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = unpack("reshardable", tmp_path)
    convert(("megatron", source), ("hf", tmp_path / "hf"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    found, tensors = read(source)
    model = build_model(ModelConfig(**found.model), key=None)
    with torch.no_grad():
        for name, spec in model.specs().items():
            for fragment, view in spec.layout.views(model.get_parameter(name)):
                view.copy_(tensors["param"][fragment.name][fragment.box.slices])
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def _rewrite(folder: Path, change: Any) -> None:
    """Write a sharded checkpoint again with other objects and tensors."""
    from mcore_ckpt.dcp import DcpFolder
    from mcore_ckpt.dcp.sink import DcpSink

    source = DcpFolder(folder)
    tensors = {name: source.read(name) for name in source}
    objects = {name: source.object(name) for name in source.objects if "_extra" not in name}
    change(tensors, objects)
    from mcore_parallel.mapping import TensorMeta

    announced = {(name,): TensorMeta(tuple(v.shape), v.dtype) for name, v in tensors.items()}
    shutil.move(folder, folder.with_name("old"))
    with DcpSink(folder, announced, objects={(name,): v for name, v in objects.items()}) as sink:
        for name, value in tensors.items():
            sink.write(name, value)


@pytest.fixture
def reshardable(tmp_path: Path) -> Path:
    return unpack("reshardable", tmp_path) / "iter_0000002"


@pytest.mark.parametrize("key", ["common_state", "common_state/shard_0_1"])
def test_common_state_is_a_file_or_an_object(key: str, reshardable: Path) -> None:
    """U49: newer checkpoints keep it among the shards; its namespace loads by the safe reader."""
    from mcore_ckpt.torchfile import load_file

    held = load_file(reshardable / "common.pt")
    held["args"].attention_backend = None  # an object of a class that is not here to be written

    def change(tensors: dict[str, torch.Tensor], objects: dict[str, Any]) -> None:
        objects[key] = [held] if "/" in key else held

    _, before = read(reshardable)
    _rewrite(reshardable, change)
    (reshardable / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    found, after = read(reshardable)
    assert found.optimizer_step == 2
    for kind, values in before.items():
        assert all(torch.equal(after[kind][name], value) for name, value in values.items())


def test_optimizer_states_that_are_flattened_by_shards(reshardable: Path) -> None:
    """`fully_sharded_model_space`: [X, Y] in shards of [x, y] is stored as [X/x, Y/y, x·y].

    megatron-core 0.16 refuses to write it, and its documentation says what older ones did.
    """
    from mcore_ckpt.torchfile import load_file

    held = load_file(reshardable / "common.pt")
    held["args"].attention_backend = None
    _, before = read(reshardable)
    cut = 0

    def flattened(value: torch.Tensor) -> torch.Tensor:
        nonlocal cut
        grid = [2 if n % 2 == 0 and n > 2 else 1 for n in value.shape]
        if value.dim() == 3:  # layers are stacked, each by itself
            grid[0] = value.shape[0]
        cut += max(grid) > 1
        pairs = [
            n for parts, size in zip(grid, value.shape, strict=True) for n in (parts, size // parts)
        ]
        order = [*range(0, len(pairs), 2), *range(1, len(pairs), 2)]
        return value.reshape(pairs).permute(order).reshape(*grid, -1).contiguous()

    def change(tensors: dict[str, torch.Tensor], objects: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.startswith("optimizer.state.")]:
            value = flattened(tensors.pop(key))
            objects["common_state"] = held
            tensors[key.replace(".state.param.", ".state.fp32_param.")] = value

    _rewrite(reshardable, change)
    (reshardable / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    found, after = read(reshardable)
    assert cut > 10
    assert found.optimizer_step == 2
    for kind, values in before.items():
        assert all(torch.equal(after[kind][name], value) for name, value in values.items())


@pytest.mark.parametrize("groups", ["together", "apart", "by parameter"])
def test_fsdp_checkpoints_have_the_names_of_modules(groups: str, reshardable: Path) -> None:
    """`fsdp_dtensor`: wrappers before names, gate and rest of gated layers apart."""
    from mcore_ckpt.torchfile import load_file

    held = load_file(reshardable / "common.pt")
    held["args"].attention_backend = None
    _, before = read(reshardable)

    def change(tensors: dict[str, torch.Tensor], objects: dict[str, Any]) -> None:
        stacked = dict(tensors)
        tensors.clear()
        objects.clear()
        objects["args"], objects["iteration"] = held["args"], 2
        if groups == "apart":
            objects["optimizer.param_groups.0.step"] = 2
        elif groups == "by parameter":
            name = "module.module.decoder.final_layernorm.weight"
            objects[f"optimizer.param_to_group_meta.{name}.lr"] = 1e-3
            objects[f"optimizer.param_to_group_meta.{name}.step"] = 2
        else:
            objects["optimizer.param_groups"] = [{"lr": 1e-3, "step": 2.0}]
        for stored, value in stacked.items():
            state, name = "", stored
            if stored.startswith("optimizer.state."):
                state, _, name = stored.removeprefix("optimizer.state.").partition(".")
            rows = {name: value}
            if name.startswith("decoder.layers."):
                rest = name.removeprefix("decoder.layers.")
                rows = {f"decoder.layers.{i}.{rest}": row for i, row in enumerate(value)}
            for own, row in rows.items():
                halves = {own: row}
                if own.endswith("linear_fc1.weight"):
                    halves = {f"{own}_{h}": r for h, r in zip("wv", row.chunk(2), strict=True)}
                for key, part in halves.items():
                    if not state:
                        tensors[f"model.module.module.{key}"] = part
                    elif state != "param":
                        tensors[f"optimizer.state.module.module.{key}.{state}"] = part

    _rewrite(reshardable, change)
    found, after = read(reshardable)
    assert found.format == "fsdp_dtensor"
    assert (found.iteration, found.optimizer_step) == (2, 2)
    for kind, values in before.items():
        assert all(torch.equal(after[kind][name], value) for name, value in values.items())


def test_what_does_not_fit_is_named(reshardable: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint of Megatron-LM"):
        MegatronCheckpoint.open(tmp_path / "nothing", known=KNOWN)
    tracker = reshardable.parent / "latest_checkpointed_iteration.txt"
    tracker.write_text("7")
    with pytest.raises(FileNotFoundError, match="iter_0000007 is missing"):
        MegatronCheckpoint.open(reshardable.parent, known=KNOWN)
    tracker.write_text("latest")
    with pytest.raises(CheckpointError, match="'latest', not a number"):
        MegatronCheckpoint.open(reshardable.parent, known=KNOWN)
    (reshardable / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ValueError, match="sharded_backend is 'zarr', only 'torch_dist' is read"):
        MegatronCheckpoint.open(reshardable, known=KNOWN)
    (reshardable / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (reshardable / "common.pt").unlink()
    with pytest.raises(CheckpointError, match=r"neither common\.pt nor a common_state object"):
        MegatronCheckpoint.open(reshardable, known=KNOWN)


def test_folders_of_ranks_must_all_be_there(tmp_path: Path) -> None:
    folder = unpack("ranks_plain", tmp_path) / "iter_0000002"
    shutil.rmtree(folder / "mp_rank_01_001")
    with pytest.raises(CheckpointError, match="lacks the folder of rank 1 of tp=2, 1 of pp=2"):
        MegatronCheckpoint.open(folder, known=KNOWN)


def test_weights_alone_need_no_layout(tmp_path: Path) -> None:
    """Weights are read from a run whose pipeline was laid out in a way that moments are not."""
    folder = unpack("pipeline", tmp_path) / "iter_0000002"
    from mcore_ckpt.torchfile import load_file

    held = load_file(folder / "common.pt")
    held["args"].attention_backend = None
    held["args"].pipeline_model_parallel_layout = "Et|tL"
    torch.save(held, folder / "common.pt")
    with pytest.raises(ValueError, match="fully_reshardable checkpoints alone"):
        MegatronCheckpoint.open(folder, known=KNOWN)
    found = MegatronCheckpoint.open(folder, known=KNOWN, optimizer=False)
    assert found.optimizer_step is None
    assert len(list(found.weights)) > 20
