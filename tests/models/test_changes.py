"""Other linears and norms by the pattern of their names, frozen tensors, and what stays fp32."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_models import (
    GPT,
    BuildContext,
    DeltaNetConfig,
    GlobalCounts,
    MambaConfig,
    ModelConfig,
    MoEConfig,
    TokenBatch,
    build_model,
    freeze,
    import_builders,
    llama,
)
from mcore_models.adapters import LoRAConfig, add_lora
from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey, all_reduce
from mcore_parallel.layout import LayoutTensor, gather_all
from mcore_parallel.testing import RankPool

LLAMA = llama(vocab_size=37, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48)


class Scaled(nn.Module):
    """What was there, times a vector that is learned; some ranks may see some tokens alone."""

    def __init__(self, base: nn.Module, size: int, context: BuildContext) -> None:
        super().__init__()
        self.base = base
        self.gain = nn.Parameter(torch.empty(size, device=context.device, dtype=context.dtype))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) * self.gain
        return out


def scaled(module: nn.Module, name: str, context: BuildContext) -> nn.Module:
    return Scaled(module, 32, context)


def measure(config: ModelConfig, layout: str) -> dict[str, Tensor]:
    """The gradients of a model whose norms and last projections are scaled."""
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.create(parallel) if dist.is_initialized() else ParallelMesh.single()
    assert mesh is not None
    replacements = {"layers.*.mlp.down": scaled, "layers.0.*norm": scaled, "final_norm": scaled}
    model = build_model(config, mesh, key=RngKey(3), replacements=replacements)
    tokens = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1))
    model.loss(batch, counts=GlobalCounts(tokens=16.0)).backward()
    specs, gradients = model.specs(), {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        flat = parameter.grad.flatten().clone()
        for sync in specs[name].grad_sync:
            flat[sync.start : sync.stop] = all_reduce(flat[sync.start : sync.stop], sync.group)
        gradients[name] = LayoutTensor(flat.view_as(parameter), specs[name].layout)
    whole = gather_all(gradients, mesh.world)
    mesh.close()
    return whole


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp"])
def test_replacements_have_the_gradients_of_one_process(ranks: RankPool, layout: str) -> None:
    want, found = measure(LLAMA, "tp=1"), ranks.run(measure, 2, LLAMA, layout)[0]
    gains = {name for name in want if name.endswith("gain")}
    assert gains == {
        *("layers.0.mlp.down.gain", "layers.1.mlp.down.gain", "final_norm.gain"),
        *("layers.0.input_norm.gain", "layers.0.post_norm.gain"),
    }
    assert "layers.1.mlp.down.base.weight" in want
    assert found.keys() == want.keys()
    total = torch.stack([g.norm() for g in want.values()]).norm()
    for name, gradient in want.items():
        distance = (found[name] - gradient).norm()
        assert distance <= 1e-5 * max(gradient.norm(), 1e-3 * total), name


def test_what_a_replacement_keeps_has_the_values_it_would_have() -> None:
    """A wrapped layer keeps its name below the wrapper's; the rest of the model is as it was."""
    plain = build_model(LLAMA, key=RngKey(3))
    changed = build_model(LLAMA, key=RngKey(3), replacements={"layers.1.attention.o": scaled})
    inside = changed.get_submodule("layers.1.attention.o")
    assert isinstance(inside, Scaled)
    assert torch.equal(inside.gain, torch.ones(32))
    assert torch.equal(
        changed.get_parameter("lm_head.weight"), plain.get_parameter("lm_head.weight")
    )
    with pytest.raises(ValueError, match=r"no name matches 'layers\.\*\.mlp\.donw'.*mlp.down"):
        build_model(LLAMA, replacements={"layers.*.mlp.donw": scaled})


def loss_of(model: GPT) -> Tensor:
    batch = TokenBatch.from_samples(
        torch.arange(16).reshape(2, 8), labels=torch.arange(1, 17).reshape(2, 8)
    )
    return model.loss(batch, counts=GlobalCounts(tokens=16.0))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_frozen_tensors_get_no_gradient_and_the_others_theirs(mode: str) -> None:
    recompute = RecomputeConfig(mode=mode)  # type: ignore[arg-type]
    free, part = (build_model(LLAMA, key=RngKey(3), recompute=recompute) for _ in range(2))
    names = freeze(part, ["embedding.*", "layers.0.*"])
    assert "layers.0.attention.k.weight" in names
    assert "embedding.weight" in names
    assert not any("layers.1" in name for name in names)
    loss_of(free).backward()
    loss_of(part).backward()
    for (name, mine), whole in zip(part.named_parameters(), free.parameters(), strict=True):
        if name.startswith(("embedding", "layers.0")):
            assert mine.grad is None, name
        else:
            assert mine.grad is not None
            assert whole.grad is not None
            assert torch.equal(mine.grad, whole.grad), name


def test_what_cannot_be_frozen() -> None:
    model = build_model(LLAMA, device="meta")
    with pytest.raises(ValueError, match=r"q.weight lies in one parameter with .*k.weight"):
        freeze(model, ["layers.0.attention.q.*"])
    with pytest.raises(ValueError, match=r"no name matches 'embeddings.weight'.*embedding.weight"):
        freeze(model, ["embeddings.weight"])


def refused(change: str) -> str:
    """What a rank of a pipeline says of a change that one stage alone cannot make."""
    mesh = ParallelMesh.create(ParallelConfig.parse("pp=2"))
    assert mesh is not None
    last = {"moe": MoEConfig(num_experts=2, top_k=2, expert_ffn_size=16), "pattern": ("*-", "*E")}
    config = replace(LLAMA, **(last if change == "dropout" else {}))  # type: ignore[arg-type]
    model = build_model(config, mesh, device="meta")
    try:
        if change == "freeze":
            freeze(model, ["layers.0.attention.q.*"])
        elif change == "twice":
            add_lora(model, LoRAConfig(targets=("layers.0.*",)))
            add_lora(model, LoRAConfig(targets=("layers.1.*",)))
        else:
            add_lora(model, LoRAConfig(dropout=0.1))
    except ValueError as error:
        return str(error)
    finally:
        mesh.close()
    return "nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("freeze", "freeze: layers.0.attention.q.weight lies in one parameter with"),
        ("twice", "the model has adapters"),
        ("dropout", "lora.dropout=0.1 cannot reach layers.1.moe.experts"),
    ],
)
def test_what_one_stage_refuses_all_refuse(ranks: RankPool, change: str, message: str) -> None:
    """And alike: the others would wait for it in the next thing that all do together."""
    said = ranks.run(refused, 2, change)
    assert said[0] == said[1]
    assert said[0].startswith(message)


def test_specs_say_what_stays_fp32_in_a_16_bit_model() -> None:
    config = replace(
        LLAMA,
        num_layers=3,
        pattern=("ME", "*-", "G."),
        mamba=MambaConfig(num_heads=8, head_dim=4, state_size=6),
        delta_net=DeltaNetConfig(
            num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=8
        ),
        moe=MoEConfig(
            num_experts=4,
            top_k=2,
            expert_ffn_size=16,
            router_bias=True,
            correction_rate=1e-3,
            score_function="sigmoid",
        ),
    )
    model = build_model(config, dtype=torch.bfloat16, device="meta")
    specs = model.specs()
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {name for name, spec in specs.items() if spec.fp32}
    assert wide == {
        *(f"layers.0.mamba.{name}" for name in ("a_log", "d", "dt_bias")),
        *(f"layers.0.moe.router.{name}" for name in ("weight", "bias", "correction")),
        *(f"layers.2.delta_net.{name}" for name in ("a_log", "dt_bias")),
    }


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_parts", "builders='my_parts' is no import path: write module:NAME"),
        ("no_such_module:PARTS", "cannot be imported: No module named"),
        ("math:PARTS", "cannot be imported: .*PARTS"),
        ("math:pi", "is no mapping from letters to builders"),
    ],
)
def test_import_paths_that_lead_nowhere(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_builders(path)
    assert import_builders(None) == {}


class Decay(nn.Module):
    """A part of somebody's own with a number that must not be rounded."""

    fp32_params = ("rate",)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.enter = nn.Linear(size, size)
        self.rate = nn.Parameter(torch.full((size,), 1.001))

    def forward(self, x: Tensor) -> Tensor:
        return (self.enter(x) * self.rate).to(x.dtype)


def decay(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    return Decay(config.hidden_size)


def test_a_part_of_ones_own_says_so_too() -> None:
    config = replace(LLAMA, pattern="D- D-")  # type: ignore[arg-type]
    model = build_model(config, dtype=torch.bfloat16, builders={"D": decay})
    specs = model.specs()
    assert model.get_parameter("layers.0.mixer.rate").dtype == torch.float32
    assert model.get_parameter("layers.0.mixer.enter.weight").dtype == torch.bfloat16
    assert specs["layers.0.mixer.rate"].fp32
    assert not specs["layers.0.mixer.enter.weight"].fp32
    assert torch.equal(model.get_parameter("layers.1.mixer.rate"), torch.full((32,), 1.001))
    with pytest.raises(ValueError, match="sparse attention by an indexer"):
        build_model(config)
