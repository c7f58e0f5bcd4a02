"""Passes over new tokens with a cache give the logits of the whole sequence without one."""

import sys
from pathlib import Path

import pytest
import torch

from mcore_inference import ContiguousCache, ModelRunner
from mcore_models import build_model
from mcore_parallel import ParallelMesh

sys.path.append(str(Path(__file__).parent))
from small_models import DRESSES, FEATURES, POST_NORM, last_logits

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
# By step: how many tokens each sequence brings. The second joins late, the first pauses and leaves,
# and a third takes its place; prefills run beside single tokens.
STEPS = [{0: 7}, {0: 1}, {0: 1, 1: 5}, {1: 1}, {0: 2, 1: 1}, {1: 1, 2: 9}, {1: 1, 2: 1}, {2: 1}]
LEAVES = {4: 0, 6: 1}
MODELS = {**DRESSES, "features": FEATURES, "post-norm": POST_NORM}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dress", MODELS)
def test_logits_of_every_pass_are_those_of_the_whole_sequence(dress: str, device: str) -> None:
    """For keys and values as for recurrent states, and for both in one model."""
    model = build_model(MODELS[dress], ParallelMesh.single(device)).eval()
    runner, cache = ModelRunner(model), ContiguousCache()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(257, (20,), generator=generator).tolist() for _ in range(3)]
    read, opened = [0, 0, 0], {}
    for step, counts in enumerate(STEPS):
        opened.update({n: cache.open(20) for n in counts if n not in opened})
        new = [(opened[n], texts[n][read[n] : read[n] + count]) for n, count in counts.items()]
        logits = runner(new, cache).cpu()
        for row, (n, count) in zip(logits, counts.items(), strict=True):
            read[n] += count
            expected = last_logits(model, texts[n][: read[n]])
            assert (row - expected).norm() < 1e-5 * expected.norm(), (step, n)
        if step in LEAVES:
            cache.close(opened[LEAVES[step]])
