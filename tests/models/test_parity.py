"""Every layout gives the loss and the gradients of one process, by global tensor name.

The metric: ‖Δ‖ ≤ 1e-5 · max(‖reference‖, 1e-3 · ‖all‖), fp32.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_models import (
    BuildContext,
    DeltaNetConfig,
    GlobalCounts,
    MambaConfig,
    ModelConfig,
    TokenBatch,
    TokenContext,
    build_model,
    gpt2,
    llama,
)
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey, all_reduce
from mcore_parallel.layout import LayoutTensor, gather_all
from mcore_parallel.tensor import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.testing import RankPool

# Two kv heads and four ranks: k and v are held twice. 37 tokens: the vocabulary is padded.
LLAMA = llama(vocab_size=37, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
GPT2 = gpt2(vocab_size=37, hidden_size=32, num_layers=2, num_heads=4, max_positions=8, dropout=0.2)
# Two groups and four ranks: B, C and a group of the norm lie on two ranks each.
MAMBA = MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2, chunk_size=4)
# Two key heads: each lies on two ranks.
DELTA = DeltaNetConfig(
    num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=8, chunk_size=4
)
HYBRID = replace(LLAMA, num_layers=3, pattern=("M-", "*.", "G."), mamba=MAMBA, delta_net=DELTA)
CUSTOM = replace(LLAMA, num_layers=3, dropout=0.2, pattern=("R-", "*S", ".Y"))


class RunningMean(nn.Module):
    """A downstream mixer that knows nothing of ranks: the mean of all tokens so far."""

    part_name = "running_mean"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.enter = nn.Linear(size, size)
        self.leave = nn.Linear(size, size)

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor:
        assert context.batch.uniform is not None
        assert hidden.shape[0] == context.batch.num_tokens
        summed = self.enter(hidden).unflatten(0, context.batch.uniform).cumsum(1)
        counts = torch.arange(1, summed.shape[1] + 1)[:, None]
        out: Tensor = self.leave((summed / counts).flatten(0, 1))
        assert context.dropout is not None
        return context.dropout(out, "running mean")


class ScaledMLP(nn.Module):
    """A downstream feed-forward that is parallel itself, with a parameter of its own."""

    parallel = True

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        shared = {
            "group": build.tp,
            "sequence_parallel": build.sequence_parallel,
            "device": build.device,
        }
        self.scale = nn.Parameter(torch.full((config.hidden_size,), 0.5))
        self.enter = ColumnParallelLinear(config.hidden_size, 64, **shared)  # type: ignore[arg-type]
        self.leave = RowParallelLinear(64, config.hidden_size, **shared)  # type: ignore[arg-type]

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.leave(self.enter(hidden * self.scale).relu())
        return out


class ScaleNorm(nn.Module):
    """A downstream norm with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([3.0]))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.gain * nn.functional.normalize(hidden, dim=-1)


def running_mean(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    return RunningMean(config.hidden_size)


def sequential(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    size = config.hidden_size
    return nn.Sequential(nn.Linear(size, 48), nn.ReLU(), nn.Linear(48, size, bias=False))


def scaled_mlp(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    return ScaledMLP(config, context)


def scale_norm(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    return ScaleNorm()


BUILDERS = {"R": running_mean, "S": sequential, "Y": scaled_mlp, "norm": scale_norm}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run gives; gradients and parameters by global name, on rank 0 only."""

    loss: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def measure(config: ModelConfig, layout: str) -> Result:
    """One training step's loss and gradients under `layout`; runs on every rank."""
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.create(parallel) if dist.is_initialized() else ParallelMesh.single()
    assert mesh is not None
    model = build_model(config, mesh, key=RngKey(11), builders=BUILDERS if config.pattern else None)
    tokens = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 8)
    mask[1, 5:] = 0
    batch = TokenBatch.from_samples(
        tokens, labels=tokens.roll(-1, 1), loss_mask=mask, sample_ids=[3, 8]
    )
    loss = model.loss(batch, counts=GlobalCounts(tokens=mask.sum()), rng=RngKey(5))
    loss.backward()
    specs = model.specs()
    parameters: dict[str, LayoutTensor] = {}
    gradients: dict[str, LayoutTensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        flat = parameter.grad.flatten().clone()
        for sync in specs[name].grad_sync:
            flat[sync.start : sync.stop] = all_reduce(flat[sync.start : sync.stop], sync.group)
        parameters[name] = LayoutTensor(parameter.detach(), specs[name].layout)
        gradients[name] = LayoutTensor(flat.view_as(parameter), specs[name].layout)
    result = Result(
        loss=loss.detach(),
        gradients=gather_all(gradients, mesh.world),
        parameters=gather_all(parameters, mesh.world),
    )
    mesh.close()
    return result


def compare(found: Result, want: Result) -> None:
    torch.testing.assert_close(found.loss, want.loss, rtol=1e-6, atol=0.0)
    assert found.gradients.keys() == want.gradients.keys()
    total = torch.stack([g.norm() for g in want.gradients.values()]).norm()
    for name, reference in want.gradients.items():
        assert found.gradients[name].shape == reference.shape, name
        distance = (found.gradients[name] - reference).norm()
        assert distance <= 1e-5 * max(reference.norm(), 1e-3 * total), (name, distance)
    for name, reference in want.parameters.items():
        assert torch.equal(found.parameters[name], reference), name


LAYOUTS = [(2, "tp=2"), (2, "tp=2,sp"), (4, "tp=4"), (4, "tp=4,sp")]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, HYBRID, CUSTOM], ids=["llama", "gpt2", "hybrid", "custom"]
)
def test_layouts_agree_with_one_process(
    ranks: RankPool, config: ModelConfig, world: int, layout: str
) -> None:
    """Loss and gradients within the metric, initial values bitwise (U24: a padded vocabulary).

    GPT2 and CUSTOM drop hidden states: masks are the same everywhere. CUSTOM has parts by
    builders: plain modules see all tokens also under sequence parallelism.
    """
    want = measure(config, "tp=1")
    results = ranks.run(measure, world, config, layout)
    compare(results[0], want)
    for other in results[1:]:
        assert torch.equal(other.loss, results[0].loss)


def test_names_are_those_of_the_whole_model_unfused() -> None:
    names = measure(LLAMA, "tp=1").parameters
    assert {name: tuple(value.shape) for name, value in names.items() if "layers.1." in name} == {
        "layers.1.input_norm.weight": (32,),
        "layers.1.attention.q.weight": (32, 32),
        "layers.1.attention.k.weight": (16, 32),
        "layers.1.attention.v.weight": (16, 32),
        "layers.1.attention.o.weight": (32, 32),
        "layers.1.post_norm.weight": (32,),
        "layers.1.mlp.gate.weight": (128, 32),
        "layers.1.mlp.up.weight": (128, 32),
        "layers.1.mlp.down.weight": (32, 128),
    }
    rest = {name for name in names if not name.startswith("layers.")}
    assert rest == {"embedding.weight", "final_norm.weight", "lm_head.weight"}
    assert names["embedding.weight"].shape == (37, 32)


def forward_logits(config: ModelConfig, layout: str) -> Tensor:
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    model = build_model(config, mesh, key=RngKey(1)).eval()
    with torch.no_grad():
        logits: Tensor = model(torch.arange(12).reshape(2, 6))
    mesh.close()
    return logits


def test_forward_gives_the_whole_vocabulary_on_every_rank(ranks: RankPool) -> None:
    with torch.no_grad():
        want = build_model(GPT2, key=RngKey(1)).eval()(torch.arange(12).reshape(2, 6))
    for logits in ranks.run(forward_logits, 2, GPT2, "tp=2,sp"):
        assert logits.shape == (2, 6, 37)
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-6)


def build_on_rank(keys: list[int]) -> str:
    mesh = ParallelMesh.create(ParallelConfig.parse("tp=2"))
    assert mesh is not None
    try:
        build_model(LLAMA, mesh, key=RngKey(keys[mesh.tp.rank]))
    except ValueError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_ranks_that_build_different_models_are_told(ranks: RankPool) -> None:
    assert ranks.run(build_on_rank, 2, [1, 1]) == ["", ""]
    for message in ranks.run(build_on_rank, 2, [1, 2]):
        assert "different models" in message
        assert "key" in message


def uneven_tokens() -> str:
    mesh = ParallelMesh.create(ParallelConfig.parse("tp=2,sp"))
    assert mesh is not None
    model = build_model(LLAMA, mesh)
    try:
        model(torch.zeros(1, 7, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_tokens_that_sequence_parallelism_cannot_cut_are_refused(ranks: RankPool) -> None:
    """A clear error before any collective, not a wrong shape inside one (U02)."""
    for message in ranks.run(uneven_tokens, 2):
        assert "7 tokens" in message
        assert "tp=2" in message
