from dataclasses import replace

import pytest

from mcore_parallel import ParallelConfig
from mcore_parallel.cost import (
    AttentionShape,
    Estimate,
    ExpertsShape,
    LayerShape,
    Link,
    Machine,
    MLPShape,
    ModelShape,
    Planner,
    Precision,
    Rate,
    Runtime,
    Workload,
    estimate,
    ladder,
    machine,
    points,
    shape,
)
from mcore_parallel.cost.layer import LOGITS_BYTES
from mcore_parallel.cost.place import place
from mcore_parallel.cost.shapes import deepseek_v3_shape, gpt_shape

H100 = machine("h100")
LLAMA = shape("llama-3-8b")
MIXTRAL = shape("mixtral-8x7b")

# A machine on which nothing but arithmetic takes time.
IDEAL = Machine(
    name="ideal",
    bf16=Rate(peak=1e15, reached=1.0),
    half_size=0.0,
    attention=1.0,
    memory=1e15,
    reserved=0.0,
    memory_bandwidth=1e30,
    streaming=1.0,
    kernel=0.0,
    intra=Link(bandwidth=1e30, latency=0.0),
    inter=Link(bandwidth=1e30, latency=0.0),
)


def cost(
    layout: str, world: int, model: ModelShape = LLAMA, on: Machine = H100, **work: object
) -> Estimate:
    asked = {"batch": 64, "seq_length": 4096, **work}
    config = ParallelConfig.parse(layout)
    return estimate(model, config, on, Workload(**asked), world=world)  # type: ignore[arg-type]


LATENT = deepseek_v3_shape(predictions=1)


@pytest.mark.parametrize(
    ("model", "layout", "world"),
    [
        (LLAMA, "tp=1", 1),
        (LLAMA, "tp=4 cp=2 dp=2 sp", 16),
        (LLAMA, "tp=2 cp=4 cp-kind=all-to-all dp=2", 16),
        (gpt_shape(hidden=1024, layers=6, heads=16), "tp=2 dp=4 zero=3", 8),
        (MIXTRAL, "tp=2 ep=4 etp=1 dp=4 sp", 8),
        (MIXTRAL, "tp=2 ep=4 etp=2 dp=4 sp", 8),
    ],
)
def test_on_an_ideal_machine_exactly_the_models_flops_are_done(
    model: ModelShape, layout: str, world: int
) -> None:
    found = cost(layout, world, model, IDEAL)
    assert found.utilization == pytest.approx(1.0, rel=1e-12)
    assert found.step == pytest.approx(found.seconds["products"] + found.seconds["attention"])


def test_without_sequence_parallelism_what_is_not_cut_is_done_by_every_rank() -> None:
    for layout in ("tp=1 ep=8", "tp=2 ep=8 etp=1 sp"):
        assert cost(layout, 8, LATENT, IDEAL).utilization == pytest.approx(1.0, rel=1e-12)
    cut = cost("tp=2 ep=8 etp=1", 8, LATENT, IDEAL)
    whole = 7168 * (1536 + 512 + 64 + 256)  # of 62 layers, 3 of them without a router
    twice = 6 * (62 * whole - 3 * 7168 * 256)
    share = LATENT.flops_per_token(4096) / (LATENT.flops_per_token(4096) + twice)
    assert cut.utilization == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [
        ("1f1b", lambda p, m: (p - 1) / (m + p - 1)),
        ("interleaved chunks=2", lambda p, m: (p - 1) / (2 * m + p - 1)),
    ],
)
def test_a_pipeline_loses_its_bubble_and_nothing_else(schedule: str, bubble: object) -> None:
    layer = LLAMA.layers[0]
    model = ModelShape(hidden_size=4096, vocab_size=1, layers=(layer,) * 32)
    found = cost(f"pp=4 schedule={schedule}", 4, model, IDEAL)
    head = 6 * 4096 * 64 * 4096 / 1e15  # of the one word there is; the last stage does it
    assert found.seconds["bubble"] / found.step == pytest.approx(
        bubble(4, 64),  # type: ignore[operator]
        abs=head,
    )


def test_recomputation_costs_a_forward_pass_and_keeps_inputs() -> None:
    plain = cost("tp=1", 1, on=IDEAL)
    again = cost("tp=1", 1, on=IDEAL, recompute="full")
    head = 6 * LLAMA.head / LLAMA.flops_per_token(4096)
    assert again.step / plain.step == pytest.approx(1 + (1 - head) / 3, rel=1e-9)
    assert again.memory[0].activations == 32 * 4096 * 4096 * 2
    core = cost("tp=1", 1, on=IDEAL, recompute="core_attn")
    assert core.step - plain.step == pytest.approx(plain.seconds["attention"] / 3)
    light = cost("tp=1", 1, recompute="norm+act")
    assert light.seconds["streaming"] > cost("tp=1", 1).seconds["streaming"]
    assert light.seconds["products"] == cost("tp=1", 1).seconds["products"]


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, LATENT])
def test_more_recomputation_saves_memory_and_costs_time(model: ModelShape) -> None:
    ways = ladder(model)
    found = [cost("dp=8 ep=1", 8, model, recompute=again) for again in ways]
    kept = [one.memory[0].activations for one in found]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(ways) == 4
    steps = [one.step for one in found]
    assert steps == sorted(steps)


def test_whole_parts_that_are_computed_again() -> None:
    plain, again = cost("tp=1", 1, on=IDEAL), cost("tp=1", 1, on=IDEAL, recompute="norm+mlp")
    mlp = 2 * 32 * 3 * 4096 * 14336 * 64 * 4096 / 1e15
    assert again.step - plain.step == pytest.approx(mlp)
    saved = plain.memory[0].activations - again.memory[0].activations
    assert saved == 4096 * 32 * 2 * (3 * 14336 + 2 * 4096)  # of MLPs, and of both norms


@pytest.mark.parametrize("tp", [1, 4])
def test_activations_are_those_of_the_published_formula(tp: int) -> None:
    """Korthikanti et al. 2022, equations 1, 2, 4 and 6: s·b·h bytes of a layer times so many."""
    s, b, h, heads = 2048, 2, 6144, 64
    model = gpt_shape(hidden=h, layers=1, heads=heads)
    runtime = Runtime(fused_attention=False, dropout=True)

    def kept(layout: str, **work: object) -> float:
        found = cost(layout, tp, model, micro_batch=b, seq_length=s, runtime=runtime, **work)
        return found.memory[0].activations / (s * b * h)

    scores = 5 * heads * s / h
    assert kept(f"tp={tp}") == pytest.approx(10 + (24 + scores) / tp)
    assert kept(f"tp={tp} sp") == pytest.approx((34 + scores) / tp)
    assert kept(f"tp={tp} sp", recompute="core_attn") == pytest.approx(34 / tp)
    assert kept(f"tp={tp}", recompute="full") == pytest.approx(2)


def test_sharding_levels_take_states_off_every_rank() -> None:
    levels = [cost(f"dp=16 zero={level}", 16).memory[0] for level in range(4)]
    totals = [memory.total for memory in levels]
    assert totals == sorted(totals, reverse=True)
    size = LLAMA.parameters
    assert levels[0].parameters == 2 * size
    assert levels[0].optimizer == 12 * size
    assert levels[1].optimizer == 12 * size / 16
    assert levels[1].gradients == 4 * size
    assert levels[2].gradients == 4 * size / 16
    assert levels[3].parameters == 2 * size / 16
    assert cost("dp=16 zero=1 replicas=4", 16).memory[0].optimizer == 12 * size / 4
    half = Precision(gradient=2.0, optimizer=8.0)
    assert cost("dp=16", 16, precision=half).memory[0].optimizer == 8 * size / 16


def test_experts_are_dealt_out_over_their_own_ranks() -> None:
    routed = 32 * 8 * 3 * 4096 * 14336
    beside = MIXTRAL.parameters - routed
    memory = cost("dp=16 ep=4", 16, MIXTRAL).memory[0]
    assert memory.parameters == 2 * (beside + routed / 4)
    assert memory.optimizer == pytest.approx(12 * (beside / 16 + routed / 4 / 4))


@pytest.mark.parametrize(
    ("layout", "world", "axis"),
    [
        ("tp=16", 16, "tp"),
        ("tp=2 cp=8 cp-kind=all-gather", 16, "cp"),
        ("pp=16", 16, "pp"),
        ("dp=16 overlap=0", 16, "dp"),
    ],
)
def test_every_axis_has_its_communication_and_no_other(layout: str, world: int, axis: str) -> None:
    alone = (
        {"tp", "cp", "ep", "pp", "dp"} - {axis} - ({"tp"} if layout.startswith("tp=2") else set())
    )
    found = cost(layout, world)
    assert found.seconds[axis] > 0
    # context parallel ranks share the parameters, and reduce their gradients
    alone -= {"dp"} if "cp=" in layout else set()
    assert all(found.seconds[other] == 0 for other in alone)
    slow = replace(H100, inter=replace(H100.inter, bandwidth=H100.inter.bandwidth / 4))
    assert cost(layout, world, on=slow).seconds[axis] > 2 * found.seconds[axis]


def test_what_hides_communication() -> None:
    assert cost("tp=8 sp", 8).seconds["tp"] > 0
    hidden = cost("tp=8 sp", 8, runtime=Runtime(tensor_overlap=0.75)).seconds["tp"]
    assert hidden == pytest.approx(cost("tp=8 sp", 8).seconds["tp"] / 4)
    experts = cost("ep=8 dp=8", 8, MIXTRAL).seconds["ep"]
    assert experts > 0
    assert cost("ep=8 dp=8", 8, MIXTRAL, runtime=Runtime(expert_overlap=1.0)).seconds["ep"] == 0
    gathered = cost("ep=8 dp=8 dispatch=all-gather", 8, MIXTRAL).seconds["ep"]
    assert gathered > experts  # 8 ranks for the 2 experts of a token
    open_, hiding = cost("dp=64 overlap=0", 64), cost("dp=64", 64)
    assert hiding.seconds["dp"] < open_.seconds["dp"]
    ring = {kind: cost(f"cp=8 cp-kind={kind}", 8).seconds["cp"] for kind in ("ring", "all-gather")}
    assert ring["ring"] < ring["all-gather"]
    every = [cost(f"dp=16 zero={level}", 16, batch=256).seconds["dp"] for level in (1, 2, 3)]
    assert every == sorted(every)  # the higher levels talk in every micro-batch


def test_layers_that_attend_in_turn_cost_their_mean() -> None:
    kinds = ("ring", "all-gather", "ring+all-gather")
    one, other, both = (cost(f"cp=8 cp-kind={kind}", 8).seconds["cp"] for kind in kinds)
    assert both == pytest.approx((one + other) / 2)


def test_memory_measured_on_gpus() -> None:
    """docs/benchmarks/training-h200.md, what the allocator held.

    Some runs are of the time when logits and their gradient were whole, which the fullest rank of a
    pipeline has none of; one had a single chunk of them.
    """
    of_layout = {point.name.partition(", ")[2]: point for point in points()}
    measured = [("one GPU", 57.2, None), ("one GPU", 58.3, 1), ("one GPU", 60.1, 2)]
    measured += [("data parallel 2", 44.5, 2), ("tensor parallel 2", 30.1, 2)]
    for name, size, logits in [*measured, ("pipeline 2", 33.2, None)]:
        point = of_layout[name]
        found = point.estimate()
        held = found.peak_memory - found.machine.reserved
        if logits is not None:
            whole = 2 * 8192 * 128256 / found.config.tp
            held += logits * whole - min(whole, LOGITS_BYTES)
        assert held / 2**30 == pytest.approx(size, rel=0.04), name


@pytest.mark.parametrize(
    ("layout", "model", "weights"),
    [
        ("tp=2", LLAMA, 0),
        ("tp=2 dp=2 zero=2", LLAMA, 1),
        ("tp=2", replace(LLAMA, tied_embeddings=True), 1),
        ("tp=2 dp=2 zero=3", replace(LLAMA, predictions=1), 2),
        ("tp=2", replace(LLAMA, predictions=1), 1),
    ],
    ids=["buffer", "reduced each time", "tied", "further, reduced", "further"],
)
def test_gradients_of_the_head_wait_for_the_backward_pass(
    layout: str, model: ModelShape, weights: int
) -> None:
    """That of the weight in a buffer of its own, unless there is one that lasts."""
    world = 4 if "dp" in layout else 2
    planner = Planner(model, H100, world)
    work = Workload(batch=4, seq_length=4096)
    stages = planner.draft(ParallelConfig.parse(layout), work).stages
    states = (1 + model.predictions) * 4096 * 4096 * (2 + 2)
    states += model.predictions * stages.costs[-1].kept
    assert stages.head.kept == states + weights * 4 * 4096 * model.vocab_size / 2


def test_the_head_of_each_micro_batch_waits_where_all_forward_passes_come_first() -> None:
    def working(schedule: str, batch: int) -> float:
        return cost(f"pp=2 schedule={schedule}", 2, batch=batch).memory[1].working

    assert working("1f1b", 8) == working("1f1b", 4)
    more = 4 * (2 + 2) * 4096 * 4096  # what the norm was given, and the gradient of the states
    assert working("gpipe", 8) - working("gpipe", 4) == more


def test_parts_add_up_and_estimates_are_reused() -> None:
    planner = Planner(LLAMA, H100, 64)
    work = Workload(batch=64, seq_length=8192)
    config = ParallelConfig.parse("tp=2 pp=4 sp schedule=interleaved chunks=2")
    first, second = planner.estimate(config, work), planner.estimate(config, work)
    assert first == second
    assert first.step == sum(first.seconds.values())
    assert min(first.seconds.values()) >= 0
    assert first.tokens_per_second == pytest.approx(64 * 8192 / first.step / 64)
    assert first.utilization == pytest.approx(
        LLAMA.flops_per_token(8192) * first.tokens_per_second / 989.4e12
    )
    assert len(first.memory) == 4
    assert first.peak_memory == first.memory[first.fullest].total
    assert first.fits


def test_place_of_a_rank() -> None:
    config = ParallelConfig.parse("tp=4 cp=2 sp dp=2").resolve(16)
    here = place(config, H100, Workload(batch=8, seq_length=4096, micro_batch=2))
    assert (here.tokens, here.share) == (4096, 1024)
    assert (here.tp_link.inside, here.cp_link.inside) == (True, True)


ODD = ModelShape(
    hidden_size=96,
    vocab_size=100,
    layers=(
        LayerShape(
            parts=(
                AttentionShape(num_heads=6, kv_heads=6, head_size=16),
                ExpertsShape(num_experts=6, top_k=2, expert=MLPShape(width=100)),
            )
        ),
    )
    * 4,
)


@pytest.mark.parametrize(
    ("layout", "model", "changes", "words"),
    [
        ("tp=4", ODD, {}, "6 heads cannot be cut over tp=4: use tp=3 or 6"),
        ("ep=4", ODD, {}, "6 experts cannot be cut over ep=4: use ep=3 or 6"),
        (
            "tp=1 etp=8",
            ODD,
            {},
            "100 channels of an expert cannot be cut over etp=8: use etp=5 or 10",
        ),
        ("cp=4 cp-kind=all-to-all", ODD, {}, "6 .*heads"),
        ("ep=2", LLAMA, {}, "ep=2 divides experts, and the model has none: use ep=1"),
        ("tp=3", LLAMA, {}, "world size 8 is not a multiple of"),
        ("dp=8", LLAMA, {"batch": 12}, "batch 12 is no multiple of dp × micro_batch = 8 × 1 = 8"),
        ("cp=8", LLAMA, {"seq_length": 4100}, "sequence length 4100 cannot be cut"),
        ("pp=8 chunks=8 schedule=interleaved", LLAMA, {}, "use chunks ≤ 4"),
        ("tp=1", LLAMA, {"precision": Precision(format="fp8")}, "ideal has no products in 'fp8'"),
        ("tp=1", LLAMA, {"batch": 0}, "batch must be a whole number of at least 1, not 0"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    layout: str, model: ModelShape, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        cost(layout, 8, model, IDEAL, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Precision(format="fp4"), "'fp4': known are bf16 and fp8"),
        (lambda: Runtime(tensor_overlap=2), "tensor_overlap=2 is a share"),
        (lambda: Runtime(imbalance=0.5), "use 1 or more"),
        (lambda: Runtime(communication_share=1.0), "leaves nothing"),
        (lambda: Runtime(dispatch="x"), "'x': known are"),  # type: ignore[arg-type]
        (
            lambda: Workload(batch=1, seq_length=1, recompute="all"),
            "use none, full, or some of core",
        ),
        (lambda: Workload(batch=1, seq_length=1, recompute="norm+norm"), "each once"),
        (lambda: replace(IDEAL, gpus_per_node=0), "at least 1, not 0"),
    ],
)
def test_values_are_checked_where_they_are_made(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]
