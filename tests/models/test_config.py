from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from mcore_models import ModelConfig, MoEConfig
from mcore_models._checks import nearest_divisors, nearest_multiples

TINY = ModelConfig(vocab_size=32, hidden_size=64, num_layers=2, num_heads=4)
MOE = MoEConfig(num_experts=8, top_k=2, expert_ffn_size=48)


def test_what_is_left_out_follows_from_the_rest() -> None:
    assert (TINY.kv_heads, TINY.head_size, TINY.mlp_size) == (4, 16, 192)
    assert TINY.layer_pattern == ("*-", "*-")
    assert replace(TINY, activation="gelu").mlp_size == 256
    assert replace(TINY, hidden_size=192).mlp_size == 512
    assert replace(TINY, num_kv_heads=2, head_dim=8, ffn_size=100).kv_heads == 2


def test_changing_one_field_changes_what_follows_from_it() -> None:
    assert replace(TINY, hidden_size=128).head_size == 32
    assert replace(TINY, num_heads=8).kv_heads == 8


def test_depth_scaling_of_the_output_projections() -> None:
    assert replace(TINY, num_layers=8).output_init_std == pytest.approx(0.02 / 4)
    assert replace(TINY, init_depth_scaled=False).output_init_std == 0.02


def test_biases() -> None:
    assert not TINY.qkv_bias
    assert replace(TINY, attention_bias=True).qkv_bias
    assert replace(TINY, linear_bias=True).qkv_bias


@pytest.mark.parametrize(
    "pattern", [("*-", "X."), [("*", "-"), ("X", ".")], [["*", "-"], "X."], "*- X."]
)
def test_patterns_are_taken_in_several_forms(pattern: object) -> None:
    assert replace(TINY, pattern=pattern).layer_pattern == ("*-", "X.")  # type: ignore[arg-type]


def test_a_config_is_a_value() -> None:
    assert replace(TINY, pattern="*- *-") == replace(TINY, pattern=("*-", "*-"))  # type: ignore[arg-type]
    assert hash(TINY) == hash(replace(TINY))
    with pytest.raises(FrozenInstanceError):
        TINY.num_layers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_heads": 3}, ("num_heads=4", "num_kv_heads=3", "2 or 4")),
        ({"num_heads": 3}, ("hidden_size=64", "num_heads=3", "63 or 66", "head_dim")),
        ({"head_dim": 7}, ("head_dim=7", "6 or 8")),
        ({"num_layers": 0}, ("num_layers=0", "at least 1")),
        ({"vocab_size": 2.5}, ("vocab_size=2.5",)),
        ({"ffn_size": -4}, ("ffn_size=-4",)),
        ({"norm": "rmsnorm"}, ("rmsnorm", "'rms_norm'")),
        ({"activation": "gelu_than"}, ("gelu_than", "'gelu_tanh'")),
        ({"position": "rotary"}, ("rotary", "rope, learned, none")),
        ({"dropout": 1.0}, ("dropout=1.0", "< 1")),
        ({"norm_eps": 0.0}, ("norm_eps=0.0",)),
        ({"rope_base": -1.0}, ("rope_base=-1.0",)),
        ({"pattern": ("*-",)}, ("1 entries", "num_layers=2", "num_layers=1")),
        ({"pattern": ("*-", "..")}, ("entry 1", "'..'")),
        ({"pattern": ("*-", "*")}, ("entry 1", "'*'")),
        ({"pattern": ("*-", "*E")}, ("layer 1", "'E'", "moe is not set", "MoEConfig")),
        ({"pattern": ("*-", "*-"), "moe": MOE}, ("moe is set", "'E'", "leave moe out")),
        ({"moe": {"num_experts": 8, "top_k": 9, "expert_ffn_size": 48}}, ("top_k=9", "8 or less")),
    ],
)
def test_errors_name_the_numbers_on_one_line(change: dict[str, object], words: object) -> None:
    with pytest.raises(ValueError) as error:
        replace(TINY, **change)  # type: ignore[arg-type]
    text = str(error.value)
    assert "\n" not in text
    for word in words:  # type: ignore[attr-defined]
        assert word in text


def test_experts_are_in_every_layer_unless_a_pattern_says_where() -> None:
    assert replace(TINY, moe=MOE).layer_pattern == ("*E", "*E")
    assert replace(TINY, moe=MOE, pattern="*- *E").layer_pattern == ("*-", "*E")  # type: ignore[arg-type]


def test_a_part_is_taken_as_the_mapping_that_a_file_holds() -> None:
    config = replace(TINY, moe=MOE)
    tree = asdict(config)
    assert tree["moe"]["num_experts"] == 8
    assert ModelConfig(**tree) == config
    with pytest.raises(TypeError, match="experts"):
        replace(TINY, moe={"experts": 8})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 0}, ("num_experts=0", "at least 1")),
        ({"top_k": 9}, ("top_k=9", "num_experts=8", "8 or less")),
        ({"top_k": 1}, ("top_k=1", "normalise_top_k=False")),
        ({"expert_ffn_size": 2.5}, ("expert_ffn_size=2.5",)),
        ({"aux_loss_coefficient": -0.1}, ("aux_loss_coefficient=-0.1", "at least 0")),
        ({"aux_loss_coefficient": float("nan")}, ("aux_loss_coefficient=nan",)),
        ({"aux_loss_scope": "microbatch"}, ("microbatch", "'micro_batch'")),
    ],
)
def test_errors_of_experts(change: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        replace(MOE, **change)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
    assert replace(MOE, top_k=1, normalise_top_k=False).top_k == 1
    assert replace(MOE, num_experts=1, top_k=1).top_k == 1


def test_nearest_values() -> None:
    assert nearest_multiples(10, 4) == "8 or 12"
    assert nearest_multiples(3, 4) == "4"
    assert nearest_divisors(32, 5) == "4 or 8"
    assert nearest_divisors(4, 9) == "4"
