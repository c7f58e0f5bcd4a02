"""What experts have room for does not depend on how documents are filled up to be cut."""

import pytest
import torch
from torch import Tensor

from mcore_models import GlobalCounts, ModelConfig, MoEConfig, TokenBatch, build_model
from mcore_parallel import ParallelConfig, ParallelMesh, all_reduce
from mcore_parallel.testing import RankPool

LENGTH = 17
"""Odd, so that unused tokens are added at the end of the shares."""


def expert_gradients(policy: str, cp: int) -> list[Tensor]:
    """Summed over the shares; a prompt that is not learned stands before the text."""
    mesh = ParallelMesh.create(ParallelConfig.parse(f"cp={cp}"))
    moe = MoEConfig(
        num_experts=4,
        top_k=2,
        expert_ffn_size=8,
        capacity_factor=1.5,
        drop_policy=policy,
        aux_loss_coefficient=0.0,
    )
    config = ModelConfig(
        vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, init_std=0.3, moe=moe
    )
    model = build_model(config, mesh, dtype=torch.float64).train()
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(32, (1, LENGTH), generator=generator) for _ in range(2))
    mask = torch.tensor([[0.0] * 6 + [1.0] * (LENGTH - 6)])
    batch = TokenBatch.from_samples(tokens, labels=labels, loss_mask=mask)
    counts = GlobalCounts(tokens=LENGTH - 6)
    model.loss(batch.share(mesh.cp.rank, cp), counts=counts).backward()
    names = dict(model.named_parameters())
    return [all_reduce(p.grad, mesh.cp) for n, p in names.items() if "experts" in n]


@pytest.mark.parametrize("policy", ["probability", "position"])
def test_unused_tokens_take_no_room(policy: str, ranks: RankPool) -> None:
    whole = ranks.run(expert_gradients, 1, policy, 1)[0]
    for shares in ranks.run(expert_gradients, 2, policy, 2):
        for found, expected in zip(shares, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
