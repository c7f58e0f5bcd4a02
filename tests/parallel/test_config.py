import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_parallel import ParallelConfig, check_sequence
from mcore_parallel.config import SHARDINGS
from mcore_parallel.context import ContextKind

KINDS = ("ring", "all-gather", "all-to-all", "two-level", "two-level:6")
SIZES = st.sampled_from([1, 2, 3, 4, 8])
CONFIGS = st.builds(
    ParallelConfig,
    tp=SIZES,
    cp=SIZES,
    pp=st.just(2),
    dp=st.none() | SIZES,
    ep=SIZES,
    etp=st.none() | SIZES,
    sequence_parallel=st.booleans(),
    context_kind=st.sampled_from(["ring", "all-to-all", "all-gather*2+two-level:1"]),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join),
    stage_layers=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    sharding=st.sampled_from(SHARDINGS[1:]),
    replicas=st.sampled_from([1, 2, 3]),
    bucket_size=st.sampled_from([1, 1000, 40_000_000]),
    overlap=st.booleans(),
)


def test_default_is_one_process() -> None:
    config = ParallelConfig().resolve(1)
    assert (config.tp, config.cp, config.pp, config.dp, config.ep, config.etp) == (1,) * 6
    assert ParallelConfig().resolve(8).dp == 8
    assert ParallelConfig(tp=2, pp=2).resolve(8).dp == 2
    assert ParallelConfig(tp=2, pp=2).resolve(8).etp == 2
    assert ParallelConfig(tp=2, ep=4, etp=1).resolve(8).etp == 1


def test_text_and_back() -> None:
    assert ParallelConfig.parse("tp=2,pp=2,sp") == ParallelConfig(
        tp=2, pp=2, sequence_parallel=True
    )
    assert ParallelConfig.parse("zero=3 replicas=2") == ParallelConfig(
        sharding="parameters", replicas=2
    )
    assert ParallelConfig.parse("zero") == ParallelConfig()
    assert ParallelConfig.parse("") == ParallelConfig()
    assert ParallelConfig.parse("sp=0 zero=0, overlap=0 stages=3+0 pp=2") == ParallelConfig(
        sharding="none", overlap=False, stage_layers=(3, 0), pp=2
    )
    text = ParallelConfig.parse("tp=2,pp=2,sp").resolve(4).describe()
    assert text == "tp=2 pp=2 dp=1 sp"
    text = ParallelConfig.parse("ep=2,overlap-experts").describe()
    assert text == "tp=1 pp=1 ep=2 overlap-experts"
    assert ParallelConfig.parse(text).overlap_expert_exchange


def test_layers_attend_over_the_context_axis_in_turn() -> None:
    config = ParallelConfig.parse("cp=4,cp-kind=all-gather*2+two-level:4")
    names = [str(config.context_kind_of(layer)) for layer in range(5)]
    assert names == ["all-gather", "all-gather", "two-level:4", "all-gather", "all-gather"]
    assert [kind.exchanging(12) for kind in map(ContextKind.parse, KINDS)] == [1, 1, 12, 2, 6]
    ParallelConfig(context_kind="two-level:3")  # without a context axis there is nothing to cut


@given(config=CONFIGS)
def test_description_says_everything(config: ParallelConfig) -> None:
    back = ParallelConfig.parse(config.describe())
    if config.etp == config.tp:  # the default, spelled out
        back = dataclasses.replace(back, etp=config.etp)
    assert back == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage=2", r"'stage=2': did you mean 'stages'\? valid are tp, cp, pp"),
        ("tensor=2", "layout item 'tensor=2': valid are tp, cp"),
        ("tp=two", "layout item 'tp=two' is not of the form 'tp=2'"),
        ("tp", "layout item 'tp' needs a value, as in 'tp=2'"),
        ("stages=8+x", r"'stages=8\+x' is not of the form 'stages=8\+8\+7\+7'"),
        ("sp=2", "'sp=2': sp is 0 or 1"),
        ("zero=4", "'zero=4': zero is 0, 1, 2 or 3"),
        ("zero=0 replicas=2", "replicas = 2 with sharding none: .* sharding optimizer"),
        ("pp=2 zero=2 schedule=zb-h1", "sharding gradients with schedule zb-h1: .* 1f1b or gpipe"),
        ("overlap-experts", "overlap_expert_exchange with ep = 1, where no tokens travel: use ep"),
        ("ep=2 overlap-experts overlap=0", "overlap = 0, which waits at once: use overlap = 1"),
        ("ep=2 overlap-experts lanes=2", "with lanes = 2, .*: use lanes = 1, or leave overlap_exp"),
        ("ep=2 overlap-experts zero=3", "with sharding parameters, .*: use sharding gradients"),
        ("ep=2 overlap-experts schedule=zb-h1", "zb-h1 has no pairs .* use schedule 1f1b or"),
        ("tp=2 tp=4", "gives tp twice"),
        ("cp-kind=al-gather", "'al-gather': did you mean 'all-gather'"),
        ("cp-kind=two-level:x", "'two-level:x' is not of the form 'two-level:2'"),
        ("cp-kind=ring*0", r"'ring\*0' is not of the form 'ring\*2'"),
        ("cp=4 cp-kind=ring+two-level:3", "'two-level:3' over cp=4 .* one of 1, 2, 4"),
        ("tp=0", "tp must be a whole number of at least 1, not 0"),
    ],
)
def test_wrong_text_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig.parse(text)


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (
            ParallelConfig(tp=4),
            10,
            "world size 10 is not a multiple of tp × cp × pp = 4 × 1 × 1 = 4; "
            "nearest valid world sizes: 8 and 12",
        ),
        (ParallelConfig(tp=4, cp=2), 3, r"4 × 2 × 1 = 8; nearest valid world sizes: 8$"),
        (
            ParallelConfig(tp=2, dp=3),
            8,
            r"8 is not dp × tp × cp × pp = 3 × 2 × 1 × 1 = 6; valid is world size 6 \(or dp = 4",
        ),
        (ParallelConfig(tp=3, dp=3), 8, "= 9; valid is world size 9$"),
        (
            ParallelConfig(tp=2, pp=2, ep=4),
            8,
            r"etp × ep = 2 × 4 = 8 does not divide the 4 ranks of a pipeline stage .* ep: 1, 2$",
        ),
        (
            ParallelConfig(replicas=3),
            8,
            "replicas = 3 does not divide dp = 8; valid .*: 1, 2, 4, 8$",
        ),
        (
            ParallelConfig(ep=4, replicas=4),
            8,
            "replicas = 4 does not divide edp = 2; valid replicas: 1, 2$",
        ),
        (ParallelConfig(etp=3), 8, "3 × 1 = 3 does not divide the 8 .* etp must divide 8"),
        (
            ParallelConfig(tp=2, pp=2, ep=2, etp=1, order="tp-pp-cp-ep-dp"),
            8,
            "stages are 2 ranks apart for dense parameters and 1 for experts; put pp last",
        ),
        (ParallelConfig(order="tp-pp"), 4, "order 'tp-pp' leaves out dp, which has size 4"),
        (ParallelConfig(), 0, "world size must be at least 1, not 0"),
    ],
)
def test_world_that_does_not_fit_is_answered_with_the_next_that_does(
    config: ParallelConfig, world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config.resolve(world_size)


def test_values_are_checked_where_they_are_given() -> None:
    with pytest.raises(ValueError, match=r"cp must be a whole number of at least 1, not 1\.5"):
        ParallelConfig(cp=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tp must be a whole number of at least 1, not True"):
        ParallelConfig(tp=True)
    with pytest.raises(ValueError, match="order 'tp-tp-dp-pp' must name each of tp, cp, ep, dp"):
        ParallelConfig(order="tp-tp-dp-pp")
    with pytest.raises(ValueError, match="order 'tp-xp' must name"):
        ParallelConfig(order="tp-xp")
    with pytest.raises(ValueError, match="order 'dp-pp' leaves out tp, which has size 2"):
        ParallelConfig(tp=2, order="dp-pp")
    with pytest.raises(ValueError, match=r"stage_layers \[3, 4, 5\] must be 2 counts"):
        ParallelConfig(pp=2, stage_layers=(3, 4, 5))
    with pytest.raises(ValueError, match=r"stage_layers \[3, -4\] must be 2 counts"):
        ParallelConfig(pp=2, stage_layers=(3, -4))


def test_sequence_that_ranks_cannot_share_is_rejected_before_anything_runs() -> None:
    """Case U02: length 10, TP 4, sequence parallel."""
    config = ParallelConfig(tp=4, sequence_parallel=True)
    message = r"sequence length 10 cannot be cut into tp = 4 slices .* lengths: 8 and 12"
    with pytest.raises(ValueError, match=message):
        check_sequence(config, 10)
    check_sequence(config, 12)
    check_sequence(ParallelConfig(tp=4), 10)
    with pytest.raises(ValueError, match=r"length 3 .* nearest valid lengths: 4$"):
        check_sequence(config, 3)
    with pytest.raises(ValueError, match=r"length 0 cannot be cut into tokens; .* lengths: 1$"):
        check_sequence(ParallelConfig(), 0)


@given(tp=SIZES, cp=SIZES, sp=st.booleans(), length=st.integers(1, 500))
def test_sequence_rule_is_what_the_cutting_needs(tp: int, cp: int, sp: bool, length: int) -> None:
    """Case U02: every cut that will be made has to come out even, and the neighbours named do."""
    config = ParallelConfig(tp=tp, cp=cp, sequence_parallel=sp)
    fits = (cp == 1 or length % (2 * cp) == 0) and (not sp or (length % (cp * tp) == 0))
    if fits:
        check_sequence(config, length)
        return
    with pytest.raises(ValueError, match=f"sequence length {length} ") as caught:
        check_sequence(config, length)
    neighbours = str(caught.value).rpartition(": ")[2].split(" and ")
    assert len(neighbours) <= 2
    for neighbour in map(int, neighbours):
        check_sequence(config, neighbour)
    assert int(neighbours[-1]) > length


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": None}, "schedule must be a name, not None"),
        ({"dispatcher": 3}, "dispatcher must be a name, not 3"),
        ({"context_kind": ("ring",)}, r"context_kind must be a name, not \('ring',\)"),
        ({"order": None}, "order must be a name, not None"),
        ({"sharding": 3}, "sharding must be a name, not 3"),
        ({"pp": 2, "first_stage_layers": -1}, "first_stage_layers must be .* at least 0, not -1"),
        ({"pp": 2, "last_stage_layers": 1.5}, "last_stage_layers must be .* at least 0, not 1.5"),
    ],
)
def test_values_of_another_type(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**fields)


def test_a_text_with_layers_below_none() -> None:
    with pytest.raises(ValueError, match=r"first_stage_layers must be .* not -1"):
        ParallelConfig.parse("pp=2,first=-1")
