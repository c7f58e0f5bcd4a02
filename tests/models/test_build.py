"""Building: layouts checked, letters resolved, values placed."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mcore_kernels import KernelConfig
from mcore_models import (
    BuildContext,
    ModelConfig,
    MoEConfig,
    build_model,
    check_layout,
    gpt2,
    llama,
)
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey

LLAMA = llama(vocab_size=37, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2)


def plain(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    return nn.Linear(config.hidden_size, config.hidden_size)


def called_mlp(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    module = nn.Linear(config.hidden_size, config.hidden_size)
    module.part_name = "mlp"  # type: ignore[assignment]
    return module


def with_meta_buffer(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    module = nn.Linear(config.hidden_size, config.hidden_size)
    module.register_buffer("steps", torch.zeros(1, device=context.device))
    return module


def test_initial_values_have_the_promised_spread() -> None:
    config = llama(vocab_size=500, hidden_size=128, num_layers=8, num_heads=4, init_std=0.1)
    model = build_model(config, key=RngKey(3))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        deep = name.endswith((".o.weight", ".down.weight"))
        expected = 0.1 / 4 if deep else 0.1
        assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
        assert parameter.mean().abs().item() < 0.03 * expected, name


def test_biases_start_at_zero_and_keys_differ() -> None:
    config = gpt2(vocab_size=37, hidden_size=32, num_layers=1, num_heads=4)
    one, two = build_model(config, key=RngKey(0)), build_model(config, key=RngKey(1))
    for name, parameter in one.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
    assert not torch.equal(one.embedding.weight, two.embedding.weight)
    again = build_model(config, key=RngKey(0))
    assert torch.equal(one.embedding.weight, again.embedding.weight)


def test_no_key_leaves_zeros_for_a_load() -> None:
    model = build_model(LLAMA, key=None)
    assert not any(parameter.any() for parameter in model.parameters())


def test_dtype_of_everything() -> None:
    model = build_model(replace(LLAMA, pattern="P- *- *P *-"), dtype=torch.bfloat16,  # type: ignore[arg-type]
                        builders={"P": plain})  # fmt: skip
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16


def test_meta_needs_no_memory_even_with_plain_parts() -> None:
    config = replace(LLAMA, pattern="P- *- *P *-")  # type: ignore[arg-type]
    model = build_model(config, device="meta", builders={"P": plain})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.specs().keys() == dict(model.named_parameters()).keys()


def test_plain_parts_keep_their_own_values_alike_on_every_stage() -> None:
    """A plain module's values depend on key and layer, not on the stage or the global generator."""
    config = replace(LLAMA, pattern="P- *- P- *P")  # type: ignore[arg-type]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    whole = build_model(config, builders={"P": plain})
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    mesh = ParallelMesh.arithmetic(ParallelConfig(pp=2), world_size=2, rank=1)
    part = build_model(config, mesh, builders={"P": plain})
    values = dict(whole.named_parameters())
    assert {"layers.2.mixer.weight", "layers.3.feed_forward.bias"} <= values.keys()
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, values[name]), name
    assert not torch.equal(values["layers.0.mixer.weight"], values["layers.2.mixer.weight"])
    other = build_model(config, builders={"P": plain}, key=RngKey(9))
    assert not torch.equal(other.get_parameter("layers.0.mixer.weight"),
                           values["layers.0.mixer.weight"])  # fmt: skip


def test_builders_may_replace_built_in_letters() -> None:
    model = build_model(LLAMA, builders={"-": plain})
    assert "layers.0.mlp.weight" in dict(model.named_parameters())


def test_unknown_letters_are_refused_by_name() -> None:
    config = replace(LLAMA, pattern="*- *Q *- *-")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layer 1 asks for 'Q'.*\*, .*-, .*P.*builders="):
        build_model(config, builders={"P": plain})


def test_two_parts_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 2 would have two parts called 'mlp'"):
        build_model(replace(LLAMA, pattern="*- *- -- *-"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layer 1 would have two parts called 'mlp'.*part_name"):
        build_model(replace(LLAMA, pattern=("*-", "P-", "*-", "*-")), builders={"P": called_mlp})


def test_unknown_buffers_are_refused_by_name() -> None:
    config = replace(LLAMA, pattern="B- *- *- *-")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'steps' of layers\.0\.mixer"):
        build_model(config, builders={"B": with_meta_buffer})


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelConfig(tp=3), ("num_heads=4", "tp=3", "2 or 4")),
        (ParallelConfig(tp=8), ("num_heads=4", "tp=8", "use tp=4")),
        (ParallelConfig(pp=2, stage_layers=(1, 2)), ("3", "4")),
    ],
)
def test_layouts_that_cannot_carry_the_model(
    parallel: ParallelConfig, words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as error:
        check_layout(LLAMA, parallel)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_parts_of_ones_own_are_not_taken_to_split_documents() -> None:
    check_layout(LLAMA, ParallelConfig(cp=2))
    own = replace(LLAMA, pattern=("*-", "P-", "*-", "*-"))
    message = "^the part 'P' cannot split documents over cp=2 ranks: use cp=1$"
    with pytest.raises(ValueError, match=message):
        check_layout(own, ParallelConfig(cp=2), {"P": plain})
    with pytest.raises(ValueError, match=r"the part '\*' cannot split documents over cp=2"):
        check_layout(LLAMA, ParallelConfig(cp=2), {"*": plain})
    check_layout(LLAMA, ParallelConfig(cp=2), {"-": plain})


def test_experts_are_cut_over_the_expert_view() -> None:
    experts = MoEConfig(num_experts=6, top_k=2, expert_ffn_size=20)
    config = replace(LLAMA, moe=experts)
    check_layout(config, ParallelConfig(ep=3, etp=5))
    check_layout(config, ParallelConfig(tp=4, ep=6))
    for parallel, words in {
        ParallelConfig(ep=4): "num_experts=6 cannot be dealt out over ep=4: use ep=3 or 6",
        ParallelConfig(ep=2, etp=3): "expert_ffn_size=20 cannot be cut over etp=3: use etp=2 or 4",
        ParallelConfig(tp=4, etp=8): "expert_ffn_size=20 cannot be cut over etp=8: use etp=5 or 10",
        # Of a world that is known, a degree must divide the ranks as well.
        ParallelConfig(dp=4, ep=4): "use ep=2, or with another world ep=3 or 6",
        ParallelConfig(tp=8, dp=1): "use etp=4, or with another world etp=5 or 10",
        ParallelConfig(tp=3, dp=2, ep=2): "use etp=1, or with another world etp=2 or 4",
    }.items():
        with pytest.raises(ValueError, match=words):
            check_layout(config, parallel)
    with pytest.raises(ValueError, match="ep=2 divides experts, and there are none here: use ep=1"):
        check_layout(LLAMA, ParallelConfig(ep=2))


def test_letters_are_checked_before_anything_is_built() -> None:
    """Also those of layers on other pipeline stages."""
    two = ParallelConfig(pp=2)
    with pytest.raises(ValueError, match=r"layer 3 asks for 'X', which nothing builds"):
        check_layout(replace(LLAMA, pattern=("*-", "*-", "*-", "*X")), two)
    check_layout(replace(LLAMA, pattern=("*-", "*-", "*-", "*X")), two, {"X": plain})
    check_layout(replace(LLAMA, pattern=("*-", "*-", "*-", "XX")), two, {"X": plain})
    with pytest.raises(
        ValueError, match=r"layer 2 would have two parts called 'attention'.*'\*\.'"
    ):
        check_layout(replace(LLAMA, pattern=("*-", "*-", "**", "*-")), two)


def test_layouts_look_at_what_the_pattern_has() -> None:
    check_layout(replace(LLAMA, pattern=(".-",) * 4), ParallelConfig(tp=8))
    with pytest.raises(ValueError, match="ffn_size=100 cannot be cut over tp=8: use tp=5 or 10"):
        check_layout(replace(LLAMA, pattern=(".-",) * 4, ffn_size=100), ParallelConfig(tp=8))
    # Fewer kv heads than ranks: each lies on several of them.
    check_layout(LLAMA, ParallelConfig(tp=4))


def test_every_layer_is_on_exactly_one_stage() -> None:
    """30 layers on 4 stages: 8, 8, 7, 7 (U04)."""
    config = replace(LLAMA, num_layers=30)
    held = []
    for rank in range(4):
        mesh = ParallelMesh.arithmetic(ParallelConfig(pp=4), world_size=4, rank=rank)
        held.append([int(index) for index in build_model(config, mesh, device="meta").layers])
    assert [len(layers) for layers in held] == [8, 8, 7, 7]
    assert [index for layers in held for index in layers] == list(range(30))


def test_kernels_are_chosen_once_and_the_reference_agrees() -> None:
    reference = KernelConfig(**dict.fromkeys(("linear", "rms_norm", "attention"), "reference"))
    one, two = build_model(LLAMA, kernels=reference), build_model(LLAMA)
    assert one.kernels.choices()["attention"] == "reference"
    tokens = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(one(tokens), two(tokens), rtol=1e-4, atol=1e-6)
    assert build_model(LLAMA, kernels=one.kernels).kernels is one.kernels
