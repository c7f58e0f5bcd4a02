"""Safetensors folders against the safetensors library, and all that can be wrong with one."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt import CheckpointError
from mcore_ckpt.hf import SafetensorsFolder, SafetensorsSink
from mcore_parallel.layout import Box
from mcore_parallel.mapping import TensorMeta

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64,
    torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
SHAPE = (5, 3, 4)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(high, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert torch.equal(bits(ours), bits(theirs))


def all_kinds() -> dict[str, torch.Tensor]:
    tensors = {str(dtype): any_bits(SHAPE, dtype, i) for i, dtype in enumerate(DTYPES)}
    tensors["scalar"] = torch.tensor(2.5, dtype=torch.bfloat16)
    tensors["empty"] = torch.empty(0, 4, dtype=torch.float16)
    return tensors


def metas(tensors: dict[str, torch.Tensor]) -> dict[str, TensorMeta]:
    return {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], **options: int) -> None:
    with SafetensorsSink(folder, metas(tensors), **options) as sink:
        for name, value in tensors.items():
            sink.write(name, value)


def test_every_dtype_is_read_bit_for_bit(tmp_path: Path) -> None:
    tensors = all_kinds()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = SafetensorsFolder(tmp_path)
    assert set(folder) == set(tensors)
    assert len(folder) == len(tensors)
    for name, value in tensors.items():
        assert folder.meta(name) == TensorMeta(tuple(value.shape), value.dtype)
        assert folder.where(name) == str(tmp_path / "model.safetensors")
        read = folder.read(name)
        assert_same(read, value)
        read.view(-1).view(torch.uint8).fill_(1)  # the caller's own memory
        assert_same(folder.read(name), value)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_region_is_that_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "regions"
    if not folder.exists():
        folder.mkdir()
        save_file(all_kinds(), folder / "model.safetensors")
    name = data.draw(st.sampled_from([*map(str, DTYPES), "scalar", "empty"]))
    source = SafetensorsFolder(folder)
    start, shape = [], []
    for size in source.meta(name).shape:
        start.append(data.draw(st.integers(0, size)))
        shape.append(data.draw(st.integers(0, size - start[-1])))
    box = Box(tuple(start), tuple(shape))
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert_same(source.read(name, box), file.get_tensor(name)[box.slices])


def test_a_header_of_odd_length_is_read(tmp_path: Path) -> None:
    """Old writers did not pad the header: elements then lie at any address."""
    value = any_bits((3, 5), torch.float32)
    header = json.dumps({"w": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}}).encode()
    header += b" " * (1 - len(header) % 2)
    data = struct.pack("<Q", len(header)) + header + bits(value).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    assert_same(SafetensorsFolder(tmp_path).read("w"), value)


def test_what_is_written_the_library_reads(tmp_path: Path) -> None:
    tensors = all_kinds()
    tensors["transposed"] = any_bits((4, 6), torch.bfloat16).t()
    write(tmp_path / "out", tensors)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert_same(loaded[name], value)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_follow_the_names_up_to_the_limit(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.w": any_bits((10,), torch.float32, i) for i in (11, 2, 1, 10)}
    tensors["big"] = any_bits((40,), torch.float32)
    write(tmp_path / "out", tensors, max_shard_bytes=80)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert index["weight_map"] == {
        "big": "model-00001-of-00003.safetensors",
        "layers.1.w": "model-00002-of-00003.safetensors",
        "layers.10.w": "model-00003-of-00003.safetensors",
        "layers.11.w": "model-00003-of-00003.safetensors",
        "layers.2.w": "model-00002-of-00003.safetensors",
    }
    folder = SafetensorsFolder(tmp_path / "out")
    for name, value in tensors.items():
        assert_same(folder.read(name), value)
        assert folder.where(name).endswith(index["weight_map"][name])


def test_a_single_file_counts_more_than_an_index(tmp_path: Path) -> None:
    write(tmp_path / "out", {"a": torch.ones(2), "b": torch.ones(2)}, max_shard_bytes=8)
    save_file({"c": torch.ones(3)}, tmp_path / "out" / "model.safetensors")
    assert list(SafetensorsFolder(tmp_path / "out")) == ["c"]


# --- what a sink refuses and leaves behind -------------------------------------------------------

ONE = {"a": TensorMeta((2,), torch.float32), "b": TensorMeta((2,), torch.float32)}


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda sink: sink.write("c", torch.zeros(2)), "c was not announced"),
        (
            lambda sink: sink.write("a", torch.zeros(3)),
            "a: torch.float32 of shape [3], announced was torch.float32 of shape [2]",
        ),
        (
            lambda sink: sink.write("a", torch.zeros(2).half()),
            "a: torch.float16 of shape [2], announced was torch.float32 of shape [2]",
        ),
        (lambda sink: [sink.write("a", torch.zeros(2)) for _ in "12"], "a is written twice"),
        (lambda sink: sink.write("a", torch.zeros(2)), "b was announced and not written"),
    ],
)
def test_a_sink_that_fails_leaves_nothing(
    tmp_path: Path, use: Callable[[SafetensorsSink], None], message: str
) -> None:
    with (
        pytest.raises(ValueError, match=re.escape(message)),
        SafetensorsSink(tmp_path / "out", ONE) as sink,
    ):
        use(sink)
    assert not list(tmp_path.iterdir())


def test_nothing_has_the_folders_name_before_the_end(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # empty: may be there
    with SafetensorsSink(tmp_path / "out", ONE, files={"config.json": b"{}"}) as sink:
        sink.write("a", torch.zeros(2))
        sink.write("b", torch.zeros(2))
        assert not list((tmp_path / "out").iterdir())
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_occupied_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "out.partial").mkdir()
    for name, message in (
        ("file", "file is a file: give a directory that is empty or not there"),
        ("full", "full is not empty: give a directory that is empty or not there"),
        ("out", "out.partial is left of a conversion that did not finish, or is still running"),
    ):
        with (
            pytest.raises(ValueError, match=re.escape(message)),
            SafetensorsSink(tmp_path / name, ONE),
        ):
            pass
    assert (tmp_path / "out.partial").is_dir()
    assert (tmp_path / "full" / "x").is_file()


def test_dtypes_that_the_format_lacks_are_refused(tmp_path: Path) -> None:
    meta = {"z": TensorMeta((2,), torch.complex128)}
    with (
        pytest.raises(ValueError, match=re.escape("z: safetensors has no dtype for")),
        SafetensorsSink(tmp_path / "out", meta) as sink,
    ):
        sink.write("z", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match="shards of at most 0 bytes: the least is 1"):
        SafetensorsSink(tmp_path / "out", ONE, max_shard_bytes=0)


# --- damaged folders -----------------------------------------------------------------------------


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: object, offsets: object, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED_FILES: list[tuple[bytes, str]] = [
    (b"", "has 0 bytes: no safetensors file"),
    (b"\1\2\3", "has 3 bytes: no safetensors file"),
    (b"PK\3\4 something else than safetensors", "it begins with a header length of"),
    (struct.pack("<Q", 100_000_001) + b"{}", "a header length of 100000001 bytes"),
    (struct.pack("<Q", 1000) + b"{}", "is cut off: 10 bytes, and the header alone takes 1000"),
    (file_of(b"{no json"), "its header is no JSON ("),
    (file_of(b"\xff\xfe{}"), "its header is no JSON ("),
    (file_of(b"[" * 100_000), "its header is no JSON ("),
    (file_of(json.dumps({"w": {"dtype": ["U8"]}}).encode()), "w has dtype ['U8']; known are"),
    (file_of([1]), "its header is no JSON object"),
    (file_of({"w": 3}), "w is 3 in the header, not an object"),
    (file_of({"w": entry([1], [0, 1], "Q4")}, b"1"), "w has dtype 'Q4'; known are F64, F32"),
    (file_of({"w": entry([-1], [0, 1])}, b"1"), "w has shape [-1], not a list of whole numbers"),
    (file_of({"w": entry([1.0], [0, 1])}, b"1"), "w has shape [1.0], not a list"),
    (file_of({"w": entry(None, [0, 1])}, b"1"), "w has shape None, not a list"),
    (file_of({"w": entry([1], [0])}, b"1"), "w has data_offsets [0], not two whole numbers"),
    (file_of({"w": entry([1], "01")}, b"1"), "w has data_offsets '01', not two whole numbers"),
    (
        file_of({"w": entry([2, 2], [0, 3])}, b"123"),
        "w has data_offsets [0, 3] for 3 bytes, and U8 of shape [2, 2] takes 4",
    ),
    (file_of({"w": entry([4], [0, 4])}, b"123"), "is cut off: 71 bytes, and w ends at 72"),
    (file_of({"w": entry([2], [0, 2])}, b"123"), "has 71 bytes, and w, the last, ends at 70"),
    (file_of({"w": entry([2], [1, 3])}, b"123"), "w begins at byte 69, and the header ends at 68"),
    (
        file_of({"v": entry([2], [0, 2]), "w": entry([2], [1, 3])}, b"123"),
        "w begins at byte 129, and v ends at 130",
    ),
]


@pytest.mark.parametrize(
    ("contents", "message"), DAMAGED_FILES, ids=[message for _, message in DAMAGED_FILES]
)
def test_a_damaged_file_is_named(tmp_path: Path, contents: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFolder(tmp_path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert message in text
    assert "\n" not in text


def test_every_way_of_cutting_a_file_off_is_noticed(tmp_path: Path) -> None:
    save_file({"a": torch.arange(7), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors (is|has)"):
            SafetensorsFolder(tmp_path)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def break_index(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        document = json.loads(path.read_text())
        path.write_text(json.dumps(change(document) or document))

    return apply


DAMAGED_FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda folder: (folder / SECOND).unlink(),
        f"{SECOND} is missing, which {{}}/model.safetensors.index.json lists",
    ),
    (
        break_index(lambda d: d["weight_map"].update(c=FIRST)),  # type: ignore[attr-defined]
        f"model.safetensors.index.json says that c is in {FIRST}, which has no such tensor",
    ),
    (
        break_index(lambda d: d["weight_map"].update(a=SECOND)),  # type: ignore[attr-defined]
        f"says that a is in {SECOND}, which has no such tensor",
    ),
    (
        break_index(lambda d: d["weight_map"].update(a="../x")),  # type: ignore[attr-defined]
        "weight_map of a is '../x', not a file beside it",
    ),
    (break_index(lambda d: {"metadata": {}}), "weight_map is None, not an object of tensors"),
    (break_index(lambda d: [1]), "model.safetensors.index.json is no JSON object"),
    (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
        "model.safetensors.index.json is no JSON: ",
    ),
    (
        lambda folder: save_file({"a": torch.ones(1), "b": torch.ones(1)}, folder / SECOND),
        f"a is in {{}}/{FIRST} and in {{}}/{SECOND}",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED_FOLDERS)
def test_a_damaged_folder_names_file_and_tensor(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "out"
    write(folder, {"a": torch.ones(2), "b": torch.ones(2)}, max_shard_bytes=8)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFolder(folder)
    assert message.replace("{}", str(folder)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_tensors_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        FileNotFoundError, match=r"neither model\.safetensors nor model\.safe.*json"
    ):
        SafetensorsFolder(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(5000)}, path)
    folder = SafetensorsFolder(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a cannot be read: "):
        folder.read("a")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a cannot be read: "):
        folder.read("a")


def test_a_region_outside_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    for box in (Box((0, 0), (2, 4)), Box((0,), (2,))):
        with pytest.raises(ValueError, match=r"a: region .* leaves the shape \[2, 3\]"):
            folder.read("a", box)
    with pytest.raises(KeyError):
        folder.read("b")
