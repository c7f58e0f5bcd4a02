"""What ranks of Megatron-LM held in memory, compared with a checkpoint read as ours."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron_theirs import Tensors, digest, local

from mcore_ckpt.megatron import MegatronCheckpoint
from mcore_models.megatron import GPT

KNOWN = {"gpt": GPT}


def read(path: Path) -> tuple[MegatronCheckpoint, dict[str, Tensors]]:
    """Return an opened checkpoint, and all of its tensors under our names by kind."""
    found = MegatronCheckpoint.open(path, known=KNOWN)
    sources = {"param": found.weights, **found.moments}
    return found, {kind: {n: source.read(n) for n in source} for kind, source in sources.items()}


def places(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return what the oracle says about each rank of a case."""
    hashed = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.*.json"))]
    found = [torch.load(path, weights_only=True) for path in sorted(folder.glob(f"{name}.*.pt"))]
    assert hashed or found
    return hashed + found


def compare(tensors: Mapping[str, Tensors], ranks: list[dict[str, Any]]) -> int:
    """Assert that every value that ranks held is the checkpoint's; return how many tensors."""
    count = 0
    for place in ranks:
        for name, values in place["held"].items():
            if name.endswith("local_tokens_per_expert"):
                continue
            for kind in ("after", "param", "exp_avg", "exp_avg_sq"):
                if kind not in values:
                    continue
                own = local(tensors["param" if kind == "after" else kind], name, place)
                assert own.dtype == torch.float32 or kind == "after", (kind, name)
                assert _is_same(own, values[kind]), (kind, name, place["tp"], place["pp"])
                count += kind != "after"
    return count


def _is_same(own: torch.Tensor, value: Any) -> bool:
    """Compare with a tensor, or with the name of its dtype and its hash."""
    if isinstance(value, torch.Tensor):
        return torch.equal(own.to(value.dtype), value)
    dtype = getattr(torch, value[0].removeprefix("torch."))
    return digest(own.to(dtype)) == value[1]
