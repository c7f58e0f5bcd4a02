"""Plain zarr reads every array, in a process that has nothing of ours; and so does tensorstore."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch

import mcore_ckpt
from mcore_parallel.layout import LayoutTensor, TensorLayout

READER = """
import json, sys, warnings
warnings.simplefilter("error")
import zarr
root = zarr.open(sys.argv[1], mode="r")
found = {}
for name, member in root.members(max_depth=None):
    if isinstance(member, zarr.Array):
        assert root[name].shape == member.shape
        values = member[...]
        found[name] = [str(member.dtype), list(member.shape), member.attrs["dtype"],
                       values.tobytes().hex()]
for group in ("model", "exp_avg"):
    names = {name for name, _ in zarr.open(f"{sys.argv[1]}/{group}", mode="r").arrays()}
    assert names == {n.split("/")[1] for n in found if n.startswith(group + "/")}
assert not any(m.startswith(("mcore", "torch", "tensorstore")) for m in sys.modules)
print(json.dumps(found))
"""


def test_plain_zarr_reads_every_array(tmp_path: Path) -> None:
    """All dtypes and shapes; bf16 and fp8 as their bits with the real dtype beside them."""
    values = {
        "model/layers.0.attention.q.weight": torch.randn(9, 7),
        "model/scalar": torch.tensor(3.5),
        "model/empty": torch.zeros(0, 4),
        "model/cube": torch.randn(3, 4, 5, dtype=torch.float64),
        "model/half": torch.randn(6).half(),
        "model/brain": torch.randn(5, 3).bfloat16(),
        "exp_avg/eight": torch.randn(12).to(torch.float8_e4m3fn),
        "exp_avg/other_eight": torch.randn(12).to(torch.float8_e5m2),
        "exp_avg/counts": torch.arange(7),
        "exp_avg/small": torch.arange(-3, 3, dtype=torch.int8),
        "exp_avg/bits": torch.tensor([1, 65535, 7], dtype=torch.uint16),
        "exp_avg/flags": torch.tensor([True, False, True]),
        "exp_avg/waves": torch.randn(3, dtype=torch.complex64),
    }
    tensors = {
        name: LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))
        for name, value in values.items()
    }
    path = mcore_ckpt.save(tmp_path, step=1, tensors=tensors, files={"a.txt": b"a"}, chunk_bytes=64)
    command = [sys.executable, "-I", "-c", READER, str(path)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found.keys() == values.keys()
    bits = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
    for name, value in values.items():
        stored, shape, real, data = found[name]
        assert real == str(value.dtype).removeprefix("torch.")
        assert stored == bits.get(real, real)
        assert shape == list(value.shape)
        flat = value.reshape(-1)
        raw = torch.view_as_real(flat).reshape(-1) if value.is_complex() else flat
        expected = raw.view(torch.uint8).numpy() if value.numel() else np.zeros(0, np.uint8)
        assert bytes.fromhex(data) == expected.tobytes()
        opened = mcore_ckpt.open(path)[name]
        assert opened.dtype == value.dtype
        assert torch.equal(
            opened.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        )


# Other tools know nothing of checksums or of the manifest: the metadata must be all they need.
@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"file_bytes": 256}], ids=str)
def test_plain_tensorstore_reads_every_array(tmp_path: Path, options: dict[str, Any]) -> None:
    values = {
        "model/layers.0.attention.q.weight": torch.randn(9, 7),
        "model/brain": torch.randn(5, 13).bfloat16(),
        "exp_avg/cube": torch.randn(3, 4, 5, dtype=torch.float64),
        "exp_avg/scalar": torch.tensor(7),
    }
    tensors = {
        name: LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))
        for name, value in values.items()
    }
    path = mcore_ckpt.save(tmp_path, step=1, tensors=tensors, chunk_bytes=64, **options)
    for name, value in values.items():
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}"}}
        array = tensorstore.open(spec, open=True).result()
        assert array.shape == tuple(value.shape)
        found = torch.from_numpy(np.atleast_1d(array.read().result()))
        assert torch.equal(found.view(value.dtype).view(value.shape), value)
