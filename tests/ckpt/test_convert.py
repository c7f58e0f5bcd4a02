"""Hugging Face folders and checkpoints into each other, and into and out of live ranks."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt import CheckpointError
from mcore_ckpt.cli import main
from mcore_ckpt.convert import convert
from mcore_ckpt.hf import HFFolder, SafetensorsFolder, architecture, load_hf, save_hf
from mcore_ckpt.importing import load_from
from mcore_parallel import Group
from mcore_parallel.layout import Box, LayoutTensor
from mcore_parallel.testing import RankPool

pytest.importorskip("safetensors")
sys.path.append(str(Path(__file__).parent))
from toy_architecture import (
    CONFIG,
    EXPERTS,
    FFN,
    HIDDEN,
    KNOWN,
    SIZES,
    TOY,
    VOCAB,
    layouts,
    our_values,
    their_values,
    write_folder,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert torch.equal(bits(ours), bits(theirs))


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_to_native_and_back_is_bitwise(folder: Path, tmp_path: Path) -> None:
    done = convert(("hf", folder), ("native", tmp_path / "run"), known=KNOWN)
    assert done.path == tmp_path / "run" / "step_00000000"
    opened = mcore_ckpt.open(tmp_path / "run")
    ours = our_values()
    assert set(opened) == {f"model/{name}" for name in ours}
    for name, value in ours.items():
        assert_same(opened[f"model/{name}"], value)
    assert opened.state == {"config": {"model": SIZES}}
    assert opened.file("tokenizer/tokenizer.json") == (folder / "tokenizer.json").read_bytes()
    assert not mcore_ckpt.verify(tmp_path / "run").problems
    assert done.num_tensors == len(ours)
    assert done.num_bytes == sum(value.nbytes for value in ours.values())

    back = convert(("native", tmp_path / "run"), ("hf", tmp_path / "back"), known=KNOWN)
    found = SafetensorsFolder(tmp_path / "back")
    theirs = their_values()
    assert set(found) == set(theirs)
    for name, value in theirs.items():
        assert_same(found.read(name), value)
    expected = contents(folder)
    for name in ("README.md", "model.safetensors", "config.json"):
        del expected[name]
    assert expected.items() <= contents(back.path).items()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == {**CONFIG, "torch_dtype": "bfloat16"}


def test_the_checkpoint_is_what_save_writes(folder: Path, tmp_path: Path) -> None:
    """Byte for byte, chunks at the edges included."""
    convert(("hf", folder), ("native", tmp_path / "run"), known=KNOWN)
    opened = mcore_ckpt.open(tmp_path / "run")
    tensors = {
        name: LayoutTensor(opened[name], mcore_ckpt_layout(name, opened[name])) for name in opened
    }
    files = {name: opened.file(name) for name in opened.manifest.files}
    mcore_ckpt.save(tmp_path / "saved", step=0, tensors=tensors, state=opened.state, files=files)
    assert contents(tmp_path / "saved") == contents(tmp_path / "run")


def mcore_ckpt_layout(name: str, value: torch.Tensor) -> Any:
    from mcore_parallel.layout import TensorLayout

    return TensorLayout.whole(name, tuple(value.shape))


def test_dtype_and_size_of_files(folder: Path, tmp_path: Path) -> None:
    options = {"dtype": torch.float16, "max_shard_bytes": 200}
    convert(("hf", folder), ("hf", tmp_path / "half"), known=KNOWN, **options)
    found = SafetensorsFolder(tmp_path / "half")
    for name, value in their_values().items():
        assert_same(found.read(name), value.half())
    files = list((tmp_path / "half").glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    assert max(path.stat().st_size for path in files) < 2000
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"
    convert(("hf", folder), ("native", tmp_path / "a"), known=KNOWN)
    convert(("native", tmp_path / "a"), ("native", tmp_path / "b"), dtype=torch.float32)
    value = mcore_ckpt.open(tmp_path / "b")["model/embedding.weight"]
    assert_same(value, our_values()["embedding.weight"].float())


def test_without_a_config_of_its_own_one_is_made(folder: Path, tmp_path: Path) -> None:
    """A checkpoint of ours that never was a folder: the tokenizer tells the special ids."""
    tensors = {
        name: LayoutTensor(value, mcore_ckpt_layout(f"model/{name}", value))
        for name, value in our_values().items()
    }
    tensors["moment"] = LayoutTensor(torch.zeros(3), mcore_ckpt_layout("exp_avg/x", torch.zeros(3)))
    tokenizer = {
        f"tokenizer/{name}": (folder / name).read_bytes()
        for name in ("tokenizer.json", "tokenizer_config.json")
    }
    state = {"config": {"model": SIZES}}
    mcore_ckpt.save(tmp_path / "run", step=7, tensors=tensors, state=state, files=tokenizer)
    done = convert(("native", tmp_path / "run"), ("hf", tmp_path / "out"), known=KNOWN)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    special = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}
    assert config == {**SIZES, **special, "architectures": [TOY.name], "torch_dtype": "bfloat16"}
    assert done.notes == ()
    descriptor = {"tokenizer/tokenizer_config.json": b'{"format": "mcore-tokenizer"}'}
    mcore_ckpt.save(tmp_path / "ours", step=7, tensors=tensors, state=state, files=descriptor)
    done = convert(("native", tmp_path / "ours"), ("hf", tmp_path / "out2"), known=KNOWN)
    assert done.notes == ("its tokenizer is none that transformers reads, and was left out",)
    assert not (tmp_path / "out2" / "tokenizer_config.json").exists()


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path: Path) -> None:
    tied = {**SIZES, "tied": True}
    values = their_values(tied)
    same = write_folder(
        tmp_path / "same", {**values, "lm_head.weight": values["emb"].clone()}, tied=True
    )
    convert(("hf", same), ("native", tmp_path / "run"), known=KNOWN)
    assert "model/lm_head.weight" not in mcore_ckpt.open(tmp_path / "run")
    other = values["emb"].clone().view(torch.int16).add_(1).view(torch.bfloat16)
    differs = write_folder(tmp_path / "differs", {**values, "lm_head.weight": other}, tied=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal emb, which it is tied to"):
        convert(("hf", differs), ("native", tmp_path / "no"), known=KNOWN)
    assert not (tmp_path / "no").exists()


# --- live ranks ----------------------------------------------------------------------------------


class CountingSource:
    """A folder that counts the bytes asked for, by tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = SafetensorsFolder(folder)
        self.read_bytes: dict[str, int] = defaultdict(int)
        self.__iter__ = self.folder.__iter__

    def __iter__(self) -> Any:
        return iter(self.folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.folder, name)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        value = self.folder.read(name, box)
        self.read_bytes[name] += value.nbytes
        return value


def local_tensors(group: Group, dtype: torch.dtype | None = None) -> dict[str, LayoutTensor]:
    """Tensors of this rank full of ones, in the dtypes of `our_values` or in one."""
    made = {}
    for name, layout in layouts(group.rank, group.size).items():
        own = torch.float32 if "a_log" in name else torch.bfloat16
        made[name] = LayoutTensor(torch.ones(layout.shape, dtype=dtype or own), layout)
    return made


def import_counted(folder: Path) -> dict[str, int]:
    group = Group.world()
    source = CountingSource(folder)
    tensors = local_tensors(group)
    load_from(source, tensors, TOY.mapping(SIZES), group)
    ours = our_values()
    for value in tensors.values():
        expected = torch.zeros_like(value.tensor)
        for fragment, view in value.layout.views(expected):
            view.copy_(ours[fragment.name][fragment.box.slices])
        assert_same(value.tensor, expected)
    return dict(source.read_bytes)


def test_each_rank_reads_only_its_bytes(ranks: RankPool, folder: Path) -> None:
    """Straight into two ranks: halves of what is cut, all of what is replicated or computed."""
    counts = ranks.run(import_counted, 2, folder)
    row = 2 * HIDDEN
    for rank, read in enumerate(counts):
        rows = (6, VOCAB - 6)[rank]
        assert read["emb"] == read["lm_head.weight"] == rows * row
        for i in range(2):
            assert read[f"h.{i}.qkv"] == 4 * HIDDEN * row // 2
            assert read[f"h.{i}.o"] == 2 * HIDDEN * row // 2
            assert read[f"h.{i}.decay"] == 4 * HIDDEN
            for expert in range(EXPERTS):
                mine = expert // 2 == rank
                assert read.get(f"h.{i}.experts.{expert}.up", 0) == FFN * row * mine
    cut = {name: sum(read.get(name, 0) for read in counts) for name in counts[0] | counts[1]}
    theirs = their_values()
    assert all(cut[n] == v.nbytes for n, v in theirs.items() if "decay" not in n)


def import_and_export(folder: Path, out: Path, options: dict[str, Any]) -> str:
    group = Group.world()
    tensors = local_tensors(group)
    load_hf(folder, tensors, group, known=KNOWN)
    path = save_hf(
        out,
        tensors,
        group,
        architecture=TOY,
        model=SIZES,
        base_config=CONFIG,
        files={"tokenizer.json": b"{}"},
        **options,
    )
    return str(path)


@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 100}], ids=["one file", "many"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_from_live_ranks_it_is_bitwise(
    ranks: RankPool, folder: Path, tmp_path: Path, world: int, options: dict[str, Any]
) -> None:
    assert set(ranks.run(import_and_export, world, folder, tmp_path / "out", options)) == {
        str(tmp_path / "out")
    }
    found = SafetensorsFolder(tmp_path / "out")
    theirs = their_values()
    assert set(found) == set(theirs)
    for name, value in theirs.items():
        assert_same(found.read(name), value)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {**CONFIG, "torch_dtype": "bfloat16"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    assert not (tmp_path / "out.partial").exists()


def errors_of_ranks(folder: Path, out: Path, case: str) -> list[str]:
    """What every rank says when something is wrong on one of them."""
    group = Group.world()
    tensors = local_tensors(group)
    errors = []

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except (ValueError, CheckpointError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    if case == "missing":
        if group.rank == 1:
            del tensors["layers.0.attention.o.weight"]
        attempt(lambda: save_hf(out, tensors, group, architecture=TOY, model=SIZES))
    elif case == "unwanted":
        tensors = {name: value for name, value in tensors.items() if "layers.1." not in name}
        attempt(lambda: load_hf(folder, tensors, group, known=KNOWN))
    elif case == "dtype":
        bad = local_tensors(group, torch.int32) if group.rank == 1 else tensors
        attempt(lambda: load_hf(folder, bad, group, known=KNOWN))
    elif case == "disk":
        if group.rank == 1:
            import mcore_ckpt.hf.save as module

            def full(self: object, name: str, value: torch.Tensor) -> None:
                raise OSError(28, "No space left on device")

            original = module.ShardWriter.write
            module.ShardWriter.write = full  # type: ignore[method-assign]
        try:
            attempt(
                lambda: save_hf(
                    out, tensors, group, architecture=TOY, model=SIZES, max_shard_bytes=100
                )
            )
        finally:
            if group.rank == 1:
                module.ShardWriter.write = original  # type: ignore[method-assign]
    return errors


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "missing",
            "ValueError: layers.0.attention.o.weight [4, 8]: elements [0:4, 4:8] are missing",
        ),
        ("unwanted", "which no rank holds"),
        ("dtype", "is torch.bfloat16, here it is torch.int32"),
        ("disk", "failed, nothing is there: rank 1 of 2: [Errno 28] No space left on device"),
    ],
)
def test_all_ranks_hear_of_an_error_and_nothing_is_left(
    ranks: RankPool, folder: Path, tmp_path: Path, case: str, message: str
) -> None:
    for errors in ranks.run(errors_of_ranks, 2, folder, tmp_path / "out", case):
        assert len(errors) == 1
        assert message in errors[0]
        assert "\n" not in errors[0]
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_a_prefix_leaves_other_tensors_alone(folder: Path) -> None:
    tensors = {
        key: LayoutTensor(value.tensor, value.layout.renamed(lambda name: f"model/{name}"))
        for key, value in local_tensors(Group.single()).items()
    }
    moment = torch.full((3,), 7.0)
    tensors["moment"] = LayoutTensor(moment, mcore_ckpt_layout("exp_avg/x", moment))
    load_hf(HFFolder.open(folder, known=KNOWN), tensors, prefix="model/")
    whole = tensors["layers.0.attention.o.weight"].tensor
    assert_same(whole, our_values()["layers.0.attention.o.weight"])
    assert (moment == 7).all()


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_into_and_out_of_the_memory_of_a_device(folder: Path, tmp_path: Path, device: str) -> None:
    tensors = {
        key: LayoutTensor(value.tensor.to(device), value.layout)
        for key, value in local_tensors(Group.single()).items()
    }
    load_hf(folder, tensors, known=KNOWN)
    save_hf(tmp_path / "out", tensors, architecture=TOY, model=SIZES)
    found = SafetensorsFolder(tmp_path / "out")
    for name, value in their_values().items():
        assert_same(found.read(name), value)


# --- what is refused -----------------------------------------------------------------------------


def edit_config(**fields: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = {**CONFIG, **fields}
        left = {name: value for name, value in config.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(left))

    return apply


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        from safetensors.torch import save_file

        values = their_values()
        change(values)
        save_file(values, folder / "model.safetensors")

    return apply


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "hf has no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json is no JSON"),
    (
        edit_config(architectures=["OtherModel"]),
        "config.json: architectures names OtherModel, which nothing installed converts; known are",
    ),
    (edit_config(architectures=...), "config.json: architectures is None, not a list of one name"),
    (edit_config(architectures=["A", "B"]), "architectures is ['A', 'B'], not a list of one name"),
    (edit_config(hidden=...), "config.json: hidden is missing"),
    (
        edit_config(hidden=8),
        "model.safetensors: lm_head.weight has shape [11, 4], config.json asks for [11, 8]",
    ),
    (edit_config(layers=3), "hf has no tensor h.2.decay, which its config.json asks for"),
    (edit_config(layers=1), "model.safetensors: h.1.decay is no tensor that config.json asks for"),
    (
        edit_tensors(lambda values: values.pop("h.1.experts.3.up")),
        "hf has no tensor h.1.experts.3.up, which its config.json asks for",
    ),
    (
        edit_tensors(lambda values: values.update({"h.0.new": torch.ones(1)})),
        "h.0.new is no tensor that config.json asks for (ToyForCausalLM)",
    ),
    (
        edit_tensors(lambda values: values.update({"h.0.experts.1.up": torch.ones(FFN, HIDDEN)})),
        "h.0.experts.1.up is torch.float32, h.0.experts.0.up is torch.bfloat16",
    ),
    (cut_off, "model.safetensors is cut off"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_folder_that_does_not_fit_is_refused_in_one_line(
    folder: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    before = contents(tmp_path)
    errors = (ValueError, CheckpointError, FileNotFoundError)
    for target in (("native", tmp_path / "out"), ("hf", tmp_path / "out")):
        with pytest.raises(errors) as caught:
            convert(("hf", folder), target, known=KNOWN)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(errors) as caught:
        load_hf(folder, local_tensors(Group.single()), known=KNOWN)
    assert message in str(caught.value)
    assert contents(tmp_path) == before


def test_what_lies_in_the_dropped_tensors_does_not_matter(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", {**their_values(), "h.1.mask": torch.ones(9)})
    convert(("hf", folder), ("native", tmp_path / "out"), known=KNOWN)


def test_an_occupied_target_is_refused(folder: Path, tmp_path: Path) -> None:
    convert(("hf", folder), ("native", tmp_path / "run"), known=KNOWN)
    (tmp_path / "file").write_text("")
    for target in (("native", tmp_path / "run"), ("hf", folder), ("native", folder)):
        with pytest.raises(ValueError, match="is not empty: give a directory that is empty or not"):
            convert(("hf", folder), target, known=KNOWN)
    with pytest.raises(ValueError, match="file is a file"):
        convert(("hf", folder), ("native", tmp_path / "file"), known=KNOWN)
    with pytest.raises(ValueError, match="kind 'zip' is none of hf, native"):
        convert(("hf", folder), ("zip", tmp_path / "out"))


def test_a_checkpoint_that_no_architecture_can_express(tmp_path: Path) -> None:
    odd = {**SIZES, "hidden": 5}
    value = torch.zeros(2)
    tensors = {"x": LayoutTensor(value, mcore_ckpt_layout("model/x", value))}
    mcore_ckpt.save(tmp_path / "run", step=1, tensors=tensors, state={"config": {"model": odd}})
    with pytest.raises(ValueError, match="ToyForCausalLM cannot express hidden=5"):
        convert(("native", tmp_path / "run"), ("hf", tmp_path / "out"), known=KNOWN)
    state = {"config": {"model": SIZES}}
    mcore_ckpt.save(tmp_path / "other", step=1, tensors=tensors, state=state)
    with pytest.raises(ValueError, match=r"embedding\.weight is missing, which the model has"):
        convert(("native", tmp_path / "other"), ("hf", tmp_path / "out"), known=KNOWN)
    mcore_ckpt.save(tmp_path / "bare", step=1, tensors=tensors)
    with pytest.raises(ValueError, match="has no model architecture in its state"):
        convert(("native", tmp_path / "bare"), ("hf", tmp_path / "out"), known=KNOWN)
    assert not (tmp_path / "out").exists()


def test_without_the_package_that_knows_models_it_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "entry_points", lambda group: [])
    with pytest.raises(ValueError, match="pip install mcore-models"):
        convert(("hf", folder), ("native", tmp_path / "out"))


# --- interruptions and memory --------------------------------------------------------------------

KILLED = """
import os, signal, sys
sys.path.append(sys.argv[1])
from toy_architecture import KNOWN
import mcore_ckpt.convert as module
import mcore_ckpt.tensorstore_engine  # starts no thread yet, so that forking is safe

def die_after_five(source, sink, announced):
    for count, (name, meta) in enumerate(announced.items()):
        if count == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        sink.write(name, source.read(name).to(meta.dtype))

module._copy = die_after_five
for kind in ("hf", "native"):
    child = os.fork()
    if not child:
        module.convert(("hf", sys.argv[2]), (kind, sys.argv[3] + "/" + kind), known=KNOWN)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source")
    arguments = [str(Path(__file__).parent), str(folder), str(tmp_path)]
    subprocess.run([sys.executable, "-c", KILLED, *arguments], check=True)
    out = tmp_path / "hf"
    assert not out.exists()
    with pytest.raises(ValueError, match=r"hf\.partial is left of a conversion that did not"):
        convert(("hf", folder), ("hf", out), known=KNOWN)
    assert not (tmp_path / "hf.partial" / "config.json").exists()
    (tmp_path / "hf.partial").rename(tmp_path / "elsewhere")
    convert(("hf", folder), ("hf", out), known=KNOWN)
    assert any((tmp_path / "native").iterdir())
    assert mcore_ckpt.latest(tmp_path / "native") is None
    convert(("hf", folder), ("native", tmp_path / "native"), known=KNOWN)
    assert not mcore_ckpt.verify(tmp_path / "native").problems


MEASURED = """
import sys, threading, time
sys.path.append(sys.argv[1])
from toy_architecture import KNOWN
import mcore_ckpt.tensorstore_engine
from mcore_ckpt.convert import convert

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) for l in status if l.startswith("RssAnon")) // 1024

peak, done = 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)

convert(("hf", sys.argv[2]), ("native", sys.argv[3] + "/warm"), known=KNOWN)
before = anonymous()
thread = threading.Thread(target=watch, daemon=True)
thread.start()
convert(("hf", sys.argv[4]), ("native", sys.argv[3] + "/native"), known=KNOWN)
convert(("native", sys.argv[3] + "/native"), ("hf", sys.argv[3] + "/back"), known=KNOWN)
done = True
thread.join()
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_it_takes_the_memory_of_about_a_tensor(folder: Path, tmp_path: Path) -> None:
    """196 MiB in tensors of at most 16 MiB: two of these may be there at a time."""
    big = {"hidden": 1024, "layers": 14, "vocab": 8192}
    values: dict[str, torch.Tensor] = {
        "emb": torch.ones(8192, 1024).bfloat16(),
        "lm_head.weight": torch.ones(8192, 1024).bfloat16(),
    }
    for i in range(big["layers"]):
        values |= {
            f"h.{i}.qkv": torch.ones(4096, 1024).bfloat16(),
            f"h.{i}.o": torch.ones(2048, 1024).bfloat16(),
            f"h.{i}.decay": torch.ones(1024).bfloat16(),
        }
        values |= {
            f"h.{i}.experts.{e}.up": torch.ones(FFN, 1024).bfloat16() for e in range(EXPERTS)
        }
    source = write_folder(tmp_path / "big", values, **big)
    total = sum(value.nbytes for value in values.values()) >> 20
    assert total > 190
    del values
    arguments = [str(Path(__file__).parent), str(folder), str(tmp_path), str(source)]
    measured = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"},
    )
    assert measured.returncode == 0, measured.stderr
    assert int(measured.stdout) < 3 * 16, measured.stdout


# --- the command ---------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    class Entry:
        name = "hf.ToyForCausalLM"

        def load(self) -> object:
            return TOY

    monkeypatch.setattr(architecture, "entry_points", lambda group: [Entry()])
    run, back = str(tmp_path / "run"), str(tmp_path / "back")
    assert main(["convert", "--from", "hf", str(folder), "--to", "native", run]) == 0
    out = capsys.readouterr().out
    assert out == f"{run}/step_00000000: 14 tensors, 976 bytes\n"
    command = ["convert", "--from", "native", run, "--to", "hf", back]
    assert main([*command, "--max-shard-size", "1KB", "--dtype", "float32"]) == 0
    assert len(list((tmp_path / "back").glob("*.safetensors"))) == 2
    assert capsys.readouterr().out.startswith(f"{back}: 16 tensors, ")
    assert main([*command, "--max-shard-size", "many"]) == 2
    message = "mcore-ckpt: --max-shard-size 'many' is no size: write it as 5GB, 200MB or 4GiB\n"
    assert capsys.readouterr().err == message
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"mcore-ckpt: .*back is not empty: .*\n", captured.err)


def test_sizes_are_read_as_people_write_them() -> None:
    from mcore_ckpt.commands.sizes import parse_size

    sizes = {"5GB": 5e9, "200 mb": 2e8, "4GiB": 4 * 2**30, "17": 17, "3k": 3000, "1TB": 1e12}
    assert {text: parse_size(text, "--size") for text in sizes} == sizes
