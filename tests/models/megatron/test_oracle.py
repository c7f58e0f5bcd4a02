"""megatron-core itself as oracle, where it is installed: what it writes and what it computes."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mcore_ckpt.convert import convert
from mcore_models import ModelConfig, build_model

sys.path.append(str(Path(__file__).parent))
from megatron_theirs import Tensors, local
from megatron_truth import compare, places, read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed (pip install --no-deps megatron-core==0.16.1)",
    ),
]
GPT2 = {"bias": True, "norm": "LayerNorm", "swiglu": False, "position": "learned_absolute"}
WRITTEN: list[dict[str, Any]] = [
    {"name": "gpt2", "tp": 2, "dp": 2, "opt": "fully_reshardable", "tied": True, **GPT2},
    {"name": "pipeline", "tp": 2, "pp": 2, "opt": "dp_reshardable", "bf16": True, "layers": 4},
    {"name": "buckets", "tp": 2, "dp": 2, "opt": "dp_reshardable", "bucket": 1500, "bias": True},
    {"name": "plain", "tp": 2, "opt": "plain", "bf16": True},
    {"name": "plain_fp32", "opt": "plain", "heads": 4, "kv_heads": 1},
    {"name": "experts", "dp": 2, "ep": 2, "moe": True, "opt": "fully_reshardable"},
    {"name": "experts_pipeline", "pp": 2, "dp": 2, "ep": 2, "moe": True, "layers": 4,
     "opt": "dp_reshardable"},
    {"name": "experts_some", "dp": 2, "ep": 2, "moe": True, "moe_freq": [0, 1], "shared": 12,
     "sigmoid": True, "bf16": True, "opt": "dp_reshardable"},
    {"name": "experts_shared", "dp": 4, "ep": 2, "moe": True, "shared": 12,
     "opt": "dp_reshardable"},
    {"name": "tied", "pp": 2, "opt": "fully_reshardable", "tied": True, "bias": True},
    {"name": "virtual", "pp": 2, "vp": 2, "layers": 4, "opt": "dp_reshardable"},
    {"name": "virtual_experts", "pp": 2, "vp": 2, "dp": 2, "ep": 2, "layers": 4, "moe": True,
     "opt": "dp_reshardable"},
    {"name": "virtual_ranks", "pp": 2, "vp": 2, "layers": 4, "opt": "distributed",
     "format": "torch"},
    {"name": "virtual_plain", "pp": 2, "vp": 2, "layers": 4, "opt": "plain", "format": "torch",
     "bf16": True, "tied": True},
    {"name": "per_layer", "pp": 2, "opt": "fully_reshardable", "singleton": True, "qk_norm": True,
     "qkv_bias": True},
    {"name": "ranks", "tp": 2, "dp": 2, "opt": "distributed", "format": "torch", "bucket": 1500},
    {"name": "ranks_plain", "tp": 2, "pp": 2, "opt": "plain", "format": "torch", "bf16": True,
     "bias": True},
    {"name": "ranks_tied", "pp": 2, "opt": "plain", "format": "torch", "tied": True, **GPT2},
    {"name": "ranks_experts", "dp": 2, "ep": 2, "moe": True, "opt": "distributed",
     "format": "torch"},
]  # fmt: skip
COMPUTED: list[dict[str, Any]] = [
    {"name": "llama", "heads": 4, "kv_heads": 2},
    {"name": "gpt", "kv_heads": 4, "tied": True, **GPT2},
    {"name": "norms", "qk_norm": True, "qkv_bias": True, "kv_heads": 1},
    {"name": "cut", "tp": 2, "pp": 2, "layers": 4, "bias": True},
    {"name": "mixture", "moe": True, "shared": 12, "layers": 3, "moe_freq": [0, 1, 1]},
    {"name": "sigmoid", "moe": True, "sigmoid": True, "dp": 2, "ep": 2},
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with what megatron-core wrote of all cases: its ranks are started once."""
    folder = tmp_path_factory.mktemp("oracle")
    cases = [*WRITTEN, *({"opt": "none", **case} for case in COMPUTED)]
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("oracle.py")
    done = subprocess.run(
        [sys.executable, script, folder / "cases.json", folder],
        check=False,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return lambda name: folder / name


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: str(case["name"]))
def test_weights_and_moments_are_theirs(
    case: dict[str, Any], written: Callable[[str], Path], tmp_path: Path
) -> None:
    """U43 and its kind: dense and experts; tp, pp, ep, dp; after two steps of their Adam."""
    path = written(case["name"])
    found, tensors = read(path)
    assert (found.iteration, found.optimizer_step) == (2, 2)
    assert compare(tensors, places(path.parent, case["name"])) > 40
    done = convert(("auto", path), ("native", tmp_path / "run"))
    assert done.num_tensors == sum(map(len, tensors.values()))


def _ours(config: ModelConfig, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
    """Return our loss and its gradients by global name, for the tokens that the oracle takes."""
    model = build_model(config, key=None)
    specs = model.specs()
    with torch.no_grad():
        for name, spec in specs.items():
            for f, view in spec.layout.views(model.get_parameter(name)):
                view.copy_(weights[f.name][f.box.slices])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (2, 8), generator=generator)
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    grads = {name: torch.zeros_like(value) for name, value in weights.items()}
    for name, spec in specs.items():
        grad = model.get_parameter(name).grad
        if grad is not None:
            for f, view in spec.layout.views(grad):
                grads[f.name][f.box.slices] += view
    return loss, grads


@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: str(case["name"]))
def test_loss_and_gradients_are_theirs(
    case: dict[str, Any], written: Callable[[str], Path]
) -> None:
    """To 1e-5 of a gradient's norm, or of a thousandth of the norm of all where that is more."""
    path = written(case["name"])
    found, tensors = read(path)
    loss, grads = _ours(ModelConfig(**found.model), tensors["param"])
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    ranks = places(path.parent, case["name"])
    theirs = [place["loss"] for place in ranks if place["loss"] is not None]
    assert theirs
    for value in theirs:
        torch.testing.assert_close(value, loss.detach(), atol=0, rtol=1e-5)
    for place in ranks:
        for name, values in place["held"].items():
            if "grad" not in values:
                continue
            own = local(grads, name, place)
            bound = 1e-5 * max(values["grad"].norm(), 1e-3 * norm)
            assert (own - values["grad"]).norm() <= bound, name
