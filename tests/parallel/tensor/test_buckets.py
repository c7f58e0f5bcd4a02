"""The layers under gradient buckets: what they add themselves and what autograd brings meet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import Group, LayoutTensor, RngKey, initialise, param_specs
from mcore_parallel.config import ParallelConfig
from mcore_parallel.data import GradientBuckets
from mcore_parallel.layout.transfer import gather_all
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.tensor import (
    ColumnParallelLinear,
    Part,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)
from mcore_parallel.testing import RankPool

VOCAB, H, T = 7, 6, 4


class Model(nn.Module):
    """One of every layer, the head tied or not."""

    def __init__(self, tp: Group, sequence_parallel: bool, tied: bool) -> None:
        super().__init__()
        common = {"group": tp, "sequence_parallel": sequence_parallel}
        self.tied = tied
        self.embedding = VocabParallelEmbedding(VOCAB, H, **common)
        self.up = ColumnParallelLinear(H, parts=[Part("q", 4, 2), Part("k", 1, 2)], **common)
        self.down = RowParallelLinear(8, H, bias=True, **common)
        self.lm_head = VocabParallelHead(H, VOCAB, tied=tied, **common)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        q, k = self.up.split(self.up(hidden))
        q = (q.unflatten(-1, (-1, 2)) * k.unsqueeze(-2)).flatten(-2)
        hidden = hidden + self.down(q)
        logits: Tensor = self.lm_head(hidden, self.embedding.weight if self.tied else None)
        return logits


def summed_gradients(config: ParallelConfig, tied: bool) -> dict[str, Tensor]:
    """Two micro-batches, through buckets; the global gradients by name, on rank 0."""
    mesh = ParallelMesh.create(config)
    assert mesh is not None
    sequence_parallel = config.sequence_parallel
    model = Model(mesh.tp, sequence_parallel, tied)
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=sequence_parallel)
    params = dict(model.named_parameters())
    initialise(params, specs, RngKey(2))
    buckets = GradientBuckets(params, specs, mesh)
    buckets.zero()
    for step in range(2):
        tokens = torch.arange(step, step + T) % VOCAB
        loss = vocab_parallel_cross_entropy(model(tokens), tokens, mesh.tp, vocab_size=VOCAB)
        if step == 0:
            with buckets.no_sync():
                loss.sum().backward()
        else:
            loss.sum().backward()
    assert all(param.grad is None for param in params.values())
    buckets.finish()
    grads: dict[str, LayoutTensor] = buckets.gradients()
    result = gather_all(grads, mesh.world)
    mesh.close()
    return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_buckets_hold_the_gradients_of_plain_autograd(
    ranks: RankPool, size: int, sequence_parallel: bool, tied: bool
) -> None:
    config = ParallelConfig(tp=size, sequence_parallel=sequence_parallel)
    found = ranks.run(summed_gradients, size, config, tied)[0]
    model = Model(Group.single(), False, tied)
    specs = param_specs(model, tp=Group.single(), sequence_parallel=False)
    initialise(dict(model.named_parameters()), specs, RngKey(2))
    for step in range(2):
        tokens = torch.arange(step, step + T) % VOCAB
        vocab_parallel_cross_entropy(model(tokens), tokens, vocab_size=VOCAB).sum().backward()
    expected: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        for fragment, view in specs[name].layout.views(param.grad):
            expected[f"grad/{fragment.name}"] = view
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert expected[name].abs().max() > 0
        torch.testing.assert_close(grad, expected[name], msg=lambda m, n=name: f"{n}: {m}")
