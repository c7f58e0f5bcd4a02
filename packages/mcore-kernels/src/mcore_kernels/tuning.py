"""Launch parameters of kernels, which are data: one file per architecture under `tuned/`.

`default.json` has every parameter; the file of an architecture ("sm_90.json" for compute capability
9.0; "interpreter.json" for Triton's interpreter on CPU) has those that differ there. No kernel
searches at run time, so that a user's first step has no pause for it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

import torch


def tuned(op: str, device: torch.device, *names: str) -> tuple[int, ...]:
    """The parameters `names` of an operator's kernel on the device."""
    table = parameters(architecture(device))[op]
    return tuple(table[name] for name in names)


def architecture(device: torch.device) -> str:
    """The name of the file for a device."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def parameters(architecture: str) -> dict[str, dict[str, int]]:
    """Every operator's parameters on an architecture, the defaults filled in; do not change it."""
    folder = files("mcore_kernels") / "tuned"
    merged: dict[str, dict[str, int]] = json.loads((folder / "default.json").read_text())
    own = folder / f"{architecture}.json"
    if own.is_file():
        for op, values in json.loads(own.read_text()).items():
            assert values.keys() <= merged[op].keys(), (architecture, op)
            merged[op] |= values
    return merged
