"""Every way of mixing tokens over shares gives the loss and gradients of one process."""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_models import (
    AttentionConfig,
    BertConfig,
    DeltaNetConfig,
    GlobalCounts,
    MambaConfig,
    ModelConfig,
    TokenBatch,
    build_model,
    check_layout,
    llama,
)
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey, all_reduce
from mcore_parallel.context import blockwise, heads
from mcore_parallel.layout import LayoutTensor, gather_all
from mcore_parallel.testing import RankPool

LLAMA = llama(vocab_size=37, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2)
MAMBA = MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2, chunk_size=4)
DELTA = DeltaNetConfig(
    num_key_heads=2, num_value_heads=8, key_head_dim=6, value_head_dim=4, chunk_size=4
)
HYBRID = replace(LLAMA, num_layers=3, pattern=("M-", "*-", "G."), mamba=MAMBA, delta_net=DELTA)
BERT = ModelConfig(
    vocab_size=37,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    norm="layer_norm",
    norm_place="sum",
    activation="gelu",
    position="learned",
    max_positions=12,
    linear_bias=True,
    tied_embeddings=True,
    attention=AttentionConfig(causal=False),
    bert=BertConfig(),
)
MIXED = "cp-kind=ring+all-gather+all-to-all+two-level:2"


def example() -> TokenBatch:
    """Documents of 3, 9, 1 and 3 tokens, which have to be padded."""
    tokens = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
    return TokenBatch.from_samples(
        tokens, labels=tokens.roll(-1, 1), cu_seqlens=torch.tensor([0, 3, 12, 13, 16])
    )


def measure(config: ModelConfig, layout: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, by global name, of one step under `layout`."""
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.create(parallel) if dist.is_initialized() else ParallelMesh.single()
    assert mesh is not None
    model = build_model(config, mesh, key=RngKey(11))
    batch = example()
    if config.bert is not None:
        batch = replace(batch, document_labels=torch.tensor([1, 0, -1, 1]))
    batch = batch.share(mesh.cp.rank, mesh.cp.size, multiple=mesh.tp.size)
    loss = model.loss(batch, counts=GlobalCounts(tokens=16.0, documents=3.0))
    loss.backward()
    specs, gradients = model.specs(), {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        flat = parameter.grad.flatten().clone()
        for sync in specs[name].grad_sync:
            flat[sync.start : sync.stop] = all_reduce(flat[sync.start : sync.stop], sync.group)
        whole = all_reduce(flat.view_as(parameter), mesh.cp)
        gradients[name] = LayoutTensor(whole, specs[name].layout)
    result = float(all_reduce(loss.detach(), mesh.cp)), gather_all(gradients, mesh.world)
    mesh.close()
    return result


@pytest.mark.parametrize(
    ("config", "world", "layout"),
    [
        (LLAMA, 4, f"cp=4,{MIXED}"),
        (LLAMA, 4, "cp=2,tp=2,sp,cp-kind=all-to-all"),
        (LLAMA, 2, "cp=2,cp-kind=all-gather"),
        (BERT, 4, f"cp=4,{MIXED}"),
        (BERT, 4, "cp=2,tp=2,sp,cp-kind=all-gather"),
        (HYBRID, 4, "cp=4"),  # each group of B and C, and each key head, goes to two ranks
        (HYBRID, 4, "cp=2,tp=2,sp"),
    ],
)
def test_every_kind_in_a_model(
    ranks: RankPool, config: ModelConfig, world: int, layout: str
) -> None:
    """U28 and U29: uneven packed documents, kinds that differ from layer to layer.

    Where tokens see later ones, too, and documents have labels.
    """
    want = measure(config, "tp=1")
    loss, gradients = ranks.run(measure, world, config, layout)[0]
    assert loss == pytest.approx(want[0], rel=1e-6)
    assert gradients.keys() == want[1].keys()
    total = torch.stack([g.norm() for g in want[1].values()]).norm()
    for name, reference in want[1].items():
        distance = (gradients[name] - reference).norm()
        assert distance <= 1e-5 * max(reference.norm(), 1e-3 * total), (name, distance)


def count_plans() -> dict[str, int]:
    with ExitStack() as patches:
        counted = {
            module.__name__.rpartition(".")[2]: patches.enter_context(
                mock.patch.object(module, "local_documents", wraps=module.local_documents)
            )
            for module in (blockwise, heads)
        }
        measure(HYBRID, "cp=2")
    return {name: calls.call_count for name, calls in counted.items()}


def test_layers_share_what_they_plan_for_a_batch(ranks: RankPool) -> None:
    """Two of the layers exchange heads; planning may wait for the device."""
    assert ranks.run(count_plans, 2) == [{"blockwise": 1, "heads": 1}] * 2


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("cp=8,cp-kind=all-to-all", "4 query and 2 kv heads .* 8 ranks: use 4"),
        ("cp=4,tp=2,cp-kind=ring+all-to-all", "2 query and 1 kv heads .* use 2"),
        ("cp=8,cp-kind=ring*3+two-level:8", "4 query and 2 kv heads .* 8 ranks: use 4"),
    ],
)
def test_kinds_that_do_not_fit_the_heads(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(LLAMA, ParallelConfig.parse(layout))
    check_layout(LLAMA, ParallelConfig.parse(f"cp=4,{MIXED}"))


def whole_batch() -> str:
    mesh = ParallelMesh.create(ParallelConfig(cp=2))
    assert mesh is not None
    model = build_model(LLAMA, mesh)
    with pytest.raises(ValueError, match="one of 1 shares of its documents and cp=2") as error:
        model.loss(example(), counts=GlobalCounts(tokens=16.0))
    mesh.close()
    return str(error.value)


def test_a_batch_that_is_no_share_is_refused(ranks: RankPool) -> None:
    assert all("TokenBatch.share(cp.rank, 2)" in line for line in ranks.run(whole_batch, 2))
    short = build_model(replace(BERT, num_layers=1, max_positions=8))
    with pytest.raises(ValueError, match=r"a document of 9 tokens is longer .* max_positions=8"):
        short.stage_forward(example().share(0, 2))
    model = build_model(replace(LLAMA, num_layers=1))
    with pytest.raises(ValueError, match="one of 2 shares of its documents and cp=1"):
        model.loss(example().share(0, 2), counts=GlobalCounts(tokens=16.0))
