import json
from dataclasses import replace
from typing import Any

import pytest

from mcore_parallel.cost import (
    SHAPES,
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    LayerShape,
    MambaShape,
    MLPShape,
    ModelShape,
    shape,
)
from mcore_parallel.cost.files import read_machine, read_shape, shape_from_json, shape_to_json
from mcore_parallel.cost.shapes import deepseek_v3_shape


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("deepseek-v3", 671_026_404_352 + 58 * 256),  # the weights, and a correction per expert
    ],
)
def test_published_models_have_their_number_of_parameters(name: str, parameters: int) -> None:
    assert shape(name).parameters == parameters


def test_published_models_use_what_their_papers_say() -> None:
    assert shape("deepseek-v3").active_parameters == pytest.approx(37e9, rel=0.02)
    assert shape("gpt-1t").parameters == pytest.approx(1.008e12, rel=1e-3)
    assert shape("gpt-530b").parameters == pytest.approx(529.6e9, rel=1e-3)
    assert shape("nemotron-4-340b").parameters == pytest.approx(341e9, rel=1e-2)


def test_flops_of_a_token_by_hand() -> None:
    model = shape("llama3-8b-8layers")
    matmul = 8 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
    assert model.flops_per_token(8192) == 6 * matmul + 6 * 8 * 8192 * 4096
    assert model.flops_of_documents([8192, 8192]) == 2 * 8192 * model.flops_per_token(8192)
    experts = ExpertsShape(num_experts=6, top_k=2, expert=MLPShape(width=20), latent=10)
    sparse = ModelShape(
        hidden_size=24, vocab_size=37, layers=(LayerShape(parts=(experts,)),), tied_embeddings=True
    )
    each, around = 3 * 10 * 20, 6 * 24 + 2 * 24 * 10
    assert sparse.parameters == 6 * each + around + 37 * 24
    assert sparse.flops_per_token(64) == 6 * (2 * each + around + 37 * 24)
    mamba = MambaShape(num_heads=4, head_size=8, state_size=6, num_groups=2, conv_width=4)
    scan = ModelShape(hidden_size=24, vocab_size=37, layers=(LayerShape(parts=(mamba,)),))
    products = 24 * (32 + 32 + 2 * 2 * 6 + 4) + 32 * 24 + 37 * 24
    by_token = 5 * 32 * 6 + 2 * 4 * (32 + 24)
    assert scan.flops_per_token(8) == scan.flops_per_token(800) == 6 * products + 3 * by_token
    delta = DeltaNetShape(num_heads=4, key_heads=2, key_size=6, head_size=8, conv_width=4)
    scan = ModelShape(hidden_size=24, vocab_size=37, layers=(LayerShape(parts=(delta,)),))
    products = 24 * (2 * 12 + 32 + 32 + 2 * 4) + 32 * 24 + 37 * 24
    by_token = 7 * 32 * 6 + 2 * 4 * (2 * 12 + 32)
    assert scan.flops_per_token(8) == scan.flops_per_token(800) == 6 * products + 3 * by_token
    assert shape_from_json(shape_to_json(scan)) == scan


def test_a_further_prediction_costs_a_layer_and_a_head() -> None:
    plain, more = deepseek_v3_shape(), deepseek_v3_shape(predictions=1)
    assert more.parameters == plain.parameters
    last = replace(plain, layers=(*plain.layers, plain.layers[-1]))
    beside = 6 * (2 * 7168**2 + 7168 * 129280)
    assert more.flops_per_token(4096) == last.flops_per_token(4096) + beside


def test_attention_of_latent_heads_has_two_widths() -> None:
    latent = AttentionShape(
        num_heads=4, kv_heads=4, head_size=12, value_size=8, kv_rank=16, rope_size=4
    )
    model = ModelShape(hidden_size=24, vocab_size=37, layers=(LayerShape(parts=(latent,)),))
    assert model.flops_per_token(100) - model.flops_per_token(0) == 3 * 100 * 4 * (12 + 8)
    sizes = 24 * 4 * 12 + 24 * (16 + 4) + 16 * 4 * (8 + 8) + 4 * 8 * 24
    assert sum(product.size for product in latent.products(24)) == sizes


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_survive_json(name: str) -> None:
    model = shape(name)
    assert shape_from_json(json.loads(json.dumps(shape_to_json(model)))) == model


def described(**changes: Any) -> dict[str, Any]:
    data = shape_to_json(shape("mixtral-8x7b"))
    return {**data, **changes}


def broken_part(**changes: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(described()))
    data["layers"][0]["parts"][0].update(changes)
    return data  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "a shape must be an object"),
        ({"hidden_size": 8}, "needs layers"),
        (described(hiden_size=8), "did you mean 'hidden_size'"),
        (described(vocab_size="many"), "vocab_size must be a number, not 'many'"),
        (described(vocab_size=0), "vocab_size must be at least 1, not 0"),
        (described(layers=[]), "at least 1 layer"),
        (described(layers=[{"count": 0}]), r"layers\[0\].count .* not 0"),
        (described(layers=[{"count": 2}]), r"layers\[0\] needs parts"),
        (broken_part(kind="atention"), r"layers\[0\].parts\[0\].kind 'atention': known are"),
        (broken_part(heads=8), r"layers\[0\].parts\[0\] has no 'heads'"),
        (broken_part(num_heads=True), r"layers\[0\].parts\[0\].num_heads must be a number"),
    ],
)
def test_mistakes_in_a_shape_name_their_place(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shape_from_json(data)


def test_machines_of_ones_own(tmp_path: Any) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"like": "h100", "name": "mine", "inter": {"bandwidth": 1e10, "latency": 0}}')
    mine, h100 = read_machine(str(path)), read_machine("h100")
    assert (mine.name, mine.inter.bandwidth) == ("mine", 1e10)
    assert replace(mine, name="h100", inter=h100.inter) == h100
    for text, words in (
        ("{}", 'needs "like"'),
        ('{"like": "h10"}', "did you mean"),
        ('{"like": "h100", "memroy": 1}', "did you mean 'memory'"),
        ('{"like": "h100", "inter": {"bandwidth": 1}}', "inter needs latency"),
        ("{", "is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_machine(str(path))
    with pytest.raises(ValueError, match="No such file"):
        read_shape(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="did you mean 'llama-3-8b'"):
        read_shape("llama3-8b")
