"""Where parameters lie in flat buffers, layers in pipelines, and what keys are called."""

import math
import random

import pytest
import torch

from mcore_ckpt.megatron.buckets import bucket_lengths, parts_in, parts_of, place_parameters
from mcore_ckpt.megatron.keys import Bucket, apart, sort_keys
from mcore_ckpt.megatron.pieces import resolved
from mcore_ckpt.megatron.place import Degrees, joined, local_shape
from mcore_parallel.layout import TensorLayout
from mcore_parallel.mapping import TensorMeta, evaluate

ARGS = {"num_layers": 8, "pipeline_model_parallel_size": 4}


@pytest.mark.parametrize("seed", range(20))
def test_buckets_hold_what_was_put_into_them(seed: int) -> None:
    """Any shapes and any bucket size: put in by hand, as the format says, and read back."""
    chance = random.Random(seed)
    shapes = {
        f"p{i}": tuple(chance.randint(1, 20) for _ in range(chance.randint(1, 2)))
        for i in range(chance.randint(1, 12))
    }
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    limit = chance.choice([100, 300, 10_000])
    buckets: list[list[torch.Tensor]] = [[]]
    for value in reversed(values.values()):
        if sum(map(len, buckets[-1])) >= limit:
            buckets.append([])
        held = sum(map(len, buckets[-1]))
        buckets[-1] += [torch.full((-held % 64,), math.nan), value.flatten()]
    flat = [torch.cat(bucket) for bucket in buckets]
    stored = {f"b{i}": value for i, value in enumerate(flat)} | {"all": torch.cat(flat)}
    lengths = [len(value) for value in flat]
    args = {"ddp_bucket_size": limit, "world_size": 1}
    if len(lengths) > 1:
        assert bucket_lengths(shapes, sum(lengths), args, "x") == lengths
    apart = dict(parts_in(shapes, [(f"b{i}", n) for i, n in enumerate(lengths)], "x"))
    together = dict(parts_of(shapes, "all", lengths, "x"))
    for name, value in values.items():
        for layout in (apart[name], together[name]):
            result = torch.empty(layout.shape)
            for fragment, view in layout.views(result):
                view.copy_(stored[fragment.name][fragment.box.slices])
            assert torch.equal(result, value)


def test_buckets_of_another_model_are_refused() -> None:
    shapes = {"a": (10, 10), "b": (64,)}
    assert place_parameters(shapes, [164], "x") == {"b": (0, 0), "a": (0, 64)}
    with pytest.raises(ValueError, match=r"x: a of shape \[10, 10\] would end at element 164"):
        place_parameters(shapes, [163], "x")
    with pytest.raises(ValueError, match=r"end at element 164 of bucket 0, .* buckets of \[165\]"):
        place_parameters(shapes, [165], "x")
    with pytest.raises(ValueError, match=r"buckets of \[164, 7\]"):
        place_parameters(shapes, [164, 7], "x")
    with pytest.raises(ValueError, match=r"x: 165 elements, and the parameters .* take 164"):
        bucket_lengths(shapes, 165, {}, "x")


def test_layers_are_dealt_out_as_the_arguments_say() -> None:
    plain = Degrees.of(ARGS)
    assert [list(plain.layers_of(stage)) for stage in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    chunks = Degrees.of({**ARGS, "virtual_pipeline_model_parallel_size": 2})
    assert [list(chunks.layers_of(s, c)) for c in range(2) for s in range(4)] == [
        [i] for i in range(8)
    ]
    ends = Degrees.of(
        {
            **ARGS,
            "num_layers": 7,
            "decoder_first_pipeline_num_layers": 1,
            "decoder_last_pipeline_num_layers": 2,
        }
    )
    assert [list(ends.layers_of(stage)) for stage in range(4)] == [[0], [1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match="7 layers cannot be dealt out over pp=4"):
        Degrees.of({**ARGS, "num_layers": 7}).layers_of(0)
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_layout='Et\|L'"):
        Degrees.of({**ARGS, "pipeline_model_parallel_layout": "Et|L"})
    experts = Degrees.of({**ARGS, "num_experts": 6, "expert_model_parallel_size": 3})
    assert list(experts.experts_of(2)) == [4, 5]


@pytest.mark.parametrize("cut", ["whole", "rows", "columns", "gated"])
def test_parts_of_ranks_are_joined(cut: str) -> None:
    whole = torch.randn(8, 6)
    halves = {
        "whole": [whole, whole],
        "rows": [whole[:4], whole[4:]],
        "columns": [whole[:, :3], whole[:, 3:]],
        "gated": [torch.cat([whole[:2], whole[4:6]]), torch.cat([whole[2:4], whole[6:]])],
    }[cut]
    parts = [TensorLayout.whole(f"{i}", tuple(half.shape)) for i, half in enumerate(halves)]
    layout = joined(parts, cut)  # type: ignore[arg-type]
    assert local_shape(layout.shape, cut, 2) == tuple(halves[0].shape)  # type: ignore[arg-type]
    result = torch.empty(8, 6)
    for fragment, view in layout.views(result):
        view.copy_(halves[int(fragment.name)][fragment.box.slices])
    assert torch.equal(result, whole)


def test_keys_are_told_apart() -> None:
    flat = "chained_1.optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(a, b).bucket_idx_2"
    keys = sort_keys([
        "decoder.final_layernorm.weight",
        "model.output_layer.weight",
        "optimizer.state.fp32_param.output_layer.weight",
        "chained_0.optimizer.state.exp_avg.decoder.layers.x.weight",
        "optimizer.state.exp_avg_sq.output_layer.weight",
        f"{flat}.exp_avg",
        "rng_state",
    ])  # fmt: skip
    assert set(keys.weights) == {"decoder.final_layernorm.weight", "output_layer.weight"}
    assert {kind: set(named) for kind, named in keys.states.items()} == {
        "param": {"output_layer.weight"},
        "exp_avg": {"decoder.layers.x.weight"},
        "exp_avg_sq": {"output_layer.weight"},
    }
    place = Bucket(optimizer=1, group=3, buffer=0, dtype="(a, b)", bucket=2)
    assert dict(keys.buckets) == {"exp_avg": {place: f"{flat}.exp_avg"}}


def test_stacks_are_taken_apart_and_halves_joined() -> None:
    values = {
        "decoder.layers.norm.weight": torch.randn(3, 4),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": torch.randn(3, 2, 6, 4),
        "decoder.layers.7.mlp.linear_fc1.weight_w": torch.randn(2, 4),
        "decoder.layers.7.mlp.linear_fc1.weight_v": torch.randn(2, 4),
        "output_layer.weight": torch.randn(5, 4),
    }
    metas = {key: TensorMeta(tuple(v.shape), v.dtype) for key, v in values.items()}
    found = evaluate(resolved(dict(apart({key: key for key in values}, metas))), values)
    assert len(found) == 3 + 6 + 1 + 1
    assert torch.equal(
        found["decoder.layers.2.norm.weight"], values["decoder.layers.norm.weight"][2]
    )
    experts = values["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert torch.equal(
        found["decoder.layers.1.mlp.experts.experts.0.linear_fc1.weight"], experts[1, 0]
    )
    gate_up = [values[f"decoder.layers.7.mlp.linear_fc1.weight_{half}"] for half in "wv"]
    assert torch.equal(found["decoder.layers.7.mlp.linear_fc1.weight"], torch.cat(gate_up))
    half = {key: key for key in values if not key.endswith("_v")}
    with pytest.raises(ValueError, match=r"weight_w and .*weight_v one is missing"):
        dict(apart(half, metas))
