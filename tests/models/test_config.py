from dataclasses import FrozenInstanceError, replace

import pytest

from mcore_models import ModelConfig
from mcore_models.config import nearest_divisors, nearest_multiples

TINY = ModelConfig(vocab_size=32, hidden_size=64, num_layers=2, num_heads=4)


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
    ],
)
def test_errors_name_the_numbers_on_one_line(change: dict[str, object], words: object) -> None:
    with pytest.raises(ValueError) as error:
        replace(TINY, **change)  # type: ignore[arg-type]
    text = str(error.value)
    assert "\n" not in text
    for word in words:  # type: ignore[attr-defined]
        assert word in text


def test_nearest_values() -> None:
    assert nearest_multiples(10, 4) == "8 or 12"
    assert nearest_multiples(3, 4) == "4"
    assert nearest_divisors(32, 5) == "4 or 8"
    assert nearest_divisors(4, 9) == "4"
