"""Linear layers in few bits: the same under every layout, near the others, counted, refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_kernels import KernelConfig, Kernels, Target
from mcore_kernels.ops.linear.fp8 import Fp8Linear
from mcore_kernels.quant import Fp8Recipe, MicroscalingRecipe, PrecisionRules
from mcore_models import (
    GlobalCounts,
    LatentAttentionConfig,
    ModelConfig,
    MoEConfig,
    TokenBatch,
    build_model,
)
from mcore_models.adapters import LoRAConfig, add_lora
from mcore_models.adapters.layers import Adapter
from mcore_models.low_precision import check_recipe, use_low_precision
from mcore_parallel import ParallelConfig, ParallelMesh, all_reduce, data_parallel
from mcore_parallel.layout import gather_all
from mcore_parallel.testing import RankPool

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    init_std=0.1,
    pattern=("*-", "+-"),
    latent=LatentAttentionConfig(
        num_heads=4, q_rank=24, kv_rank=16, head_dim=8, rope_dim=4, value_dim=12
    ),
)
Found = list[tuple[float, dict[str, Tensor]]]


def rules(recipe: Fp8Recipe | MicroscalingRecipe, *kept: str) -> PrecisionRules:
    return PrecisionRules(
        recipes={"low": recipe}, rules=(*((name, None) for name in kept), ("*", "low"))
    )


def train(
    layout: str,
    recipe: Fp8Recipe | None,
    steps: int = 3,
    model: ModelConfig = MODEL,
    chosen: tuple[str, ...] = ("*",),
) -> Found:
    """Loss and whole gradients of each step, in float64 around the products; nothing is updated.

    In float64 sums in another order hardly ever change what is rounded to 8 bits.
    """
    mesh = ParallelMesh.create(ParallelConfig.parse(layout)) if layout else ParallelMesh.single()
    assert mesh is not None
    gpt = build_model(model, mesh, dtype=torch.float64)
    low = None
    if recipe is not None:
        wanted = tuple((pattern, "low") for pattern in chosen)
        low = use_low_precision(gpt, PrecisionRules(recipes={"low": recipe}, rules=wanted))
    buckets = data_parallel(gpt, gpt.specs(), mesh)
    found: Found = []
    for step in range(steps):
        tokens = torch.arange(32).view(2, 16) * (3 + step) % 61
        mine = mesh.dp.rank * (2 // mesh.dp.size)
        tokens = tokens[mine : mine + 2 // mesh.dp.size]
        batch = TokenBatch.from_samples(
            tokens, labels=tokens.roll(-1, 1), loss_mask=torch.ones(len(tokens), 16)
        )
        buckets.zero()
        loss = gpt.loss(batch, counts=GlobalCounts(tokens=32))
        loss.backward()
        buckets.finish()
        gradients = gather_all(buckets.gradients(), mesh.world)
        total = all_reduce(loss.detach().clone(), mesh.dp)
        found.append((float(total), {name: x.clone() for name, x in gradients.items()}))
        if low is not None:
            low.advance()
    buckets.close()
    if layout:
        mesh.close()
    return found


def differ(ours: Found, theirs: Found) -> tuple[float, str]:
    """The largest relative difference of a gradient, or difference of a loss; and of what."""
    found = [(0.0, "nothing")]
    for (loss, gradients), (other, others) in zip(ours, theirs, strict=True):
        assert gradients.keys() == others.keys()
        found.append((abs(loss - other), "loss"))
        for name, gradient in gradients.items():
            found.append((float((gradient - others[name]).norm() / others[name].norm()), name))
    return max(found)


@pytest.mark.parametrize("history", [0, 2])
def test_tensor_parallel_ranks_compute_what_one_does(ranks: RankPool, history: int) -> None:
    """Also where q, k and v lie in one weight, and where ranks hold a whole layer each."""
    recipe = Fp8Recipe(history=history)
    alone = train("", recipe)
    assert 1e-3 < differ(alone, train("", None))[0] < 0.3
    for layout in ("tp=2", "tp=2,sp"):
        found = ranks.run(train, 2, layout, recipe, timeout=300)
        assert differ(found[0], alone) < (1e-9, ""), layout


def test_scales_of_a_history_are_those_of_the_steps_before() -> None:
    now, late = train("", Fp8Recipe()), train("", Fp8Recipe(history=2))
    assert differ(now[:1], late[:1])[0] == 0  # the first step has no history
    assert differ(now[1:], late[1:])[0] > 1e-3


def test_counts_and_rules() -> None:
    model = build_model(MODEL)
    low = use_low_precision(model, rules(Fp8Recipe(scaling="block"), "layers.0.*"))
    assert low is not None
    assert low.describe() == (
        "linear layers: 6 in e4m3/e4m3 (scales of blocks), 4 in float32"
    )  # of the latent layer: into q and kv, out of both, o, gate_up and down
    assert not isinstance(model.layers["0"].get_submodule("mlp.down").linear, Fp8Linear)
    assert isinstance(model.layers["1"].get_submodule("mlp.down").linear, Fp8Linear)
    assert not isinstance(model.lm_head.linear, Fp8Linear)
    assert use_low_precision(build_model(MODEL), PrecisionRules(recipes={})) is None


MOE = replace(
    MODEL,
    latent=None,
    pattern=("*E", "*-"),
    moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_size=16, shared_ffn_size=16, expert_bias=True),
)
OF_EXPERTS = ("layers.*.experts.*",)


def test_experts_compute_the_same_wherever_they_lie(ranks: RankPool) -> None:
    """Dealt out and cut, their scales are those of one process; an expert may have no tokens."""
    recipe = Fp8Recipe(history=2)
    alone = train("", recipe, model=MOE, chosen=OF_EXPERTS)
    assert 1e-4 < differ(alone, train("", None, model=MOE))[0] < 0.3
    for layout in ("ep=2", "tp=2", "tp=2,sp,etp=1,ep=2"):
        found = ranks.run(train, 2, layout, recipe, 3, MOE, OF_EXPERTS, timeout=300)
        assert differ(found[0], alone) < (1e-9, ""), layout


def test_experts_by_blocks_are_those_of_one_process(ranks: RankPool) -> None:
    recipe = Fp8Recipe(scaling="block", grad_format="e4m3")
    alone = train("", recipe, steps=1, model=MOE, chosen=OF_EXPERTS)
    found = ranks.run(train, 2, "ep=2", recipe, 1, MOE, OF_EXPERTS, timeout=300)
    assert differ(found[0], alone) < (1e-9, "")


def test_experts_have_no_microscaling_and_rules_that_want_it_are_refused() -> None:
    low = use_low_precision(build_model(MOE), rules(MicroscalingRecipe(format="nvfp4")))
    assert low is not None
    assert low.counts == {"nvfp4 (emulated)": 8, "float32 (of experts)": 2}
    low = use_low_precision(build_model(MOE), rules(Fp8Recipe(), "*.attention.*"))
    assert low is not None
    assert low.counts == {
        "e4m3/e5m2 (scales of tensors)": 4,
        "e4m3/e5m2 (scales of tensors) (of experts)": 2,
        "float32": 4,
    }
    wanted = PrecisionRules(
        recipes={"low": MicroscalingRecipe()}, rules=(("layers.*.experts.*", "low"), ("*", None))
    )
    message = r"precision: no name matches 'layers\.\*\.experts\.\*': did you mean 'layers\."
    with pytest.raises(ValueError, match=message):
        use_low_precision(build_model(MOE), wanted)
    with pytest.raises(ValueError, match=r"no name matches 'layers\.7\.\*'"):
        use_low_precision(build_model(MOE), rules(Fp8Recipe(), "layers.7.*"))


def test_adapters_of_experts_keep_their_products() -> None:
    model = build_model(MOE)
    add_lora(model, LoRAConfig(rank=2, targets=("*.experts.down",)))
    down = model.layers["0"].get_submodule("moe.experts.down")
    products = down.linear
    use_low_precision(model, rules(Fp8Recipe()))
    assert down.linear is not products
    adapters = [m for m in model.modules() if isinstance(m, Adapter)]
    assert [one._products for one in adapters] == [products]


def test_what_a_device_cannot_multiply_is_refused_in_one_line() -> None:
    """Where formats of Blackwell are asked of a Hopper, and 8 bits of an Ampere."""
    hopper = Target(device_type="cuda", arch=(9, 0), dtype=torch.bfloat16)
    ampere = Target(device_type="cuda", arch=(8, 0), dtype=torch.bfloat16)
    for recipe, target, needs in (
        (MicroscalingRecipe(), hopper, r"10\.0 or newer, the target's is 9\.0"),
        (MicroscalingRecipe(format="nvfp4"), hopper, r"10\.0 or newer, the target's is 9\.0"),
        (Fp8Recipe(), ampere, r"8\.9 or newer, the target's is 8\.0"),
    ):
        with pytest.raises(ValueError, match=f"low_precision: cannot run on .*: needs .*{needs}"):
            check_recipe(recipe, target)
        check_recipe(recipe, target, emulate=True)
    check_recipe(Fp8Recipe(scaling="row"), hopper)


def test_the_operators_are_those_of_the_model() -> None:
    kernels = Kernels(KernelConfig(quantize="reference", fp8_matmul="reference"))
    model = build_model(MODEL, kernels=kernels)
    use_low_precision(model, rules(Fp8Recipe()))
    op = model.layers["0"].get_submodule("mlp.down").linear
    assert isinstance(op, Fp8Linear)
    assert op._quantize is kernels.quantize
    assert op._matmul is kernels.fp8_matmul
