from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from mcore_models import AttentionConfig, MambaConfig, ModelConfig, MoEConfig, RopeConfig
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


def test_a_letter_for_each_layer() -> None:
    """Mixers and feed-forwards alone; a stage's end and further heads are no layers."""
    config = replace(TINY, num_layers=4, pattern="*-X-")  # type: ignore[arg-type]
    assert config.layer_pattern == ("*.", ".-", "X.", ".-")
    assert replace(config, pattern=["*-X-"]) == config  # type: ignore[arg-type]
    assert replace(TINY, pattern="*-").layer_pattern == ("*.", ".-")  # type: ignore[arg-type]
    assert replace(TINY, num_layers=1, pattern="*-").layer_pattern == ("*-",)  # type: ignore[arg-type]
    for pattern, reason in {"*-|*-": "give the layers of each stage", "*-/*-": "heads"}.items():
        with pytest.raises(ValueError, match=reason):
            replace(TINY, num_layers=4, pattern=pattern)  # type: ignore[arg-type]


def test_biases_of_the_parts() -> None:
    plain = replace(TINY, linear_bias=True)
    assert (plain.qkv_bias, plain.output_bias, plain.ffn_bias, plain.expert_bias) == (True,) * 4
    apart = replace(
        plain,
        attention=AttentionConfig(output_bias=False),
        mlp_bias=False,
        moe=MOE,
        pattern="*E *-",
    )  # type: ignore[arg-type]
    assert (apart.qkv_bias, apart.output_bias, apart.ffn_bias, apart.expert_bias) == (
        *(True, False, False, False),
    )
    assert replace(apart, moe=replace(MOE, expert_bias=True)).expert_bias


YARN = {"scaling": "yarn", "factor": 2.0, "original_length": 16}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention": {"qk_norm": "heads"}}, ("'heads'", "head, all, l2")),
        ({"attention": {"window": 0}}, ("attention.window=0", "at least 1")),
        ({"attention": {"softcap": 0.0}}, ("attention.softcap=0.0",)),
        ({"attention": {"scale": float("inf")}}, ("attention.scale=inf",)),
        ({"attention": {"local_layers": [0]}}, ("local_layers", "give attention.window")),
        ({"attention": {"window": 4, "local_layers": [2]}}, ("layer 2", "num_layers=2", "0 to 1")),
        ({"attention": {"nope_layers": [1, 0]}}, ("nope_layers", "(0, 1)")),
        ({"attention": {"qk_norm": "all"}, "norm": "layer_norm"}, ("qk_norm='head'",)),
        ({"attention": {"sinks": True}, "pattern": "X- X-"}, ("no layer", "'*'")),
        ({"attention": {"nope_layers": [0]}, "position": "none"}, ("position='none'",)),
        ({"rope": {"rotary_dim": 5}}, ("rotary_dim=5", "4 or 6")),
        ({"rope": {"rotary_dim": 18}}, ("rotary_dim=18", "16 channels", "16 or less")),
        ({"rope": {"scaling": "ntk"}}, ("'ntk'", "linear, llama3, yarn, longrope")),
        ({"rope": {"factor": 2.0}}, ("rope.factor=2.0", "scaling=None")),
        ({"rope": {"scaling": "yarn", "factor": 2.0}}, ("needs rope.original_length",)),
        ({"rope": {**YARN, "low_freq_factor": 1.0}}, ("low_freq_factor", "llama3")),
        ({"rope": {**YARN, "factor": 0.5}}, ("0.5", "at least 1")),
        ({"rope": {"sections": [2, 2, 2]}}, ("6 pairs", "8 pairs")),
        ({"rope": {"interleaved_sections": True}}, ("rope.sections",)),
        ({"rope": YARN, "position": "learned"}, ("rope", "position='learned'")),
        ({"norm_bias": False}, ("norm_bias", "'rms_norm'")),
        ({"norm_place": "after"}, ("'after'", "pre, post, both")),
        ({"residual": "paralel"}, ("'parallel'",)),
        ({"glu_limit": 7.0, "activation": "gelu"}, ("glu_limit", "activation='gelu'")),
        ({"glu_limit": -1.0}, ("glu_limit=-1.0",)),
        ({"logit_softcap": 0.0}, ("logit_softcap=0.0",)),
        ({"residual_scale": 0.0}, ("residual_scale=0.0",)),
    ],
)
def test_errors_of_features(change: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        replace(TINY, **change)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_longrope_has_a_factor_for_each_pair() -> None:
    factors = {"short_factors": (1.0,) * 7, "long_factors": (2.0,) * 8}
    rope = RopeConfig(scaling="longrope", factor=2.0, original_length=8, **factors)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="short_factors has 7 values, and 8 pairs"):
        replace(TINY, rope=rope)


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True is about attention"),
        ({"linear_bias": True}, "linear_bias=True is about attention or a feed-forward part"),
        ({"mlp_bias": True}, "mlp_bias=True is about a feed-forward part"),
    ],
)
def test_biases_that_no_layer_has_are_refused(fields: dict[str, bool], message: str) -> None:
    mamba = MambaConfig(num_heads=8, head_dim=16, state_size=6)
    with pytest.raises(ValueError, match=message):
        replace(TINY, num_heads=0, pattern="MM", mamba=mamba, **fields)  # type: ignore[arg-type]
    assert replace(TINY, pattern="X. X.", **fields).layer_pattern == ("X.", "X.")  # type: ignore[arg-type]
