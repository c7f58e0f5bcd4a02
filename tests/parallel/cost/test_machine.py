from dataclasses import replace

import pytest

from mcore_parallel import ParallelConfig
from mcore_parallel.cost import MACHINES, machine
from mcore_parallel.cost.machines import Reach
from mcore_parallel.cost.place import reach

H100 = machine("h100")


@pytest.mark.parametrize("name", MACHINES)
def test_larger_products_reach_more_of_the_peak_and_never_all(name: str) -> None:
    one = machine(name)
    shares = [
        2 * n**3 / one.product(n, n, n) / one.bf16.peak for n in (128, 512, 2048, 8192, 32768)
    ]
    assert shares == sorted(shares)
    assert 0.9 * one.bf16.reached < shares[-1] < one.bf16.reached
    assert shares[0] < 0.05


def test_a_thin_product_takes_the_time_of_its_bytes() -> None:
    seconds = H100.product(1, 8192, 8192)
    assert seconds == pytest.approx(H100.stream(2 * 8192 * 8192), rel=0.1)


def test_number_formats_that_a_machine_does_not_have() -> None:
    assert H100.product(8192, 8192, 8192, "fp8") < 0.7 * H100.product(8192, 8192, 8192)
    with pytest.raises(ValueError, match="a100 has no products in 'fp8': use bf16"):
        machine("a100").rate("fp8")
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        machine("H100")


@pytest.mark.parametrize(
    ("layout", "axes", "size", "per_node"),
    [
        ("tp=8 pp=4 dp=4", ["tp"], 8, 8),
        ("tp=8 pp=4 dp=4", ["dp"], 4, 1),
        ("tp=2 cp=2 pp=4 dp=8", ["dp"], 8, 2),
        ("tp=2 cp=2 pp=4 dp=8", ["cp", "dp"], 16, 4),
        ("pp=2 dp=64", ["dp"], 64, 8),
        ("tp=2 pp=2 dp=2", ["pp"], 2, 2),
        ("tp=4 pp=2 dp=4", ["pp"], 2, 1),
    ],
)
def test_how_much_of_a_group_shares_a_node(
    layout: str, axes: list[str], size: int, per_node: int
) -> None:
    config = ParallelConfig.parse(layout)
    assert config.dp is not None
    config = config.resolve(config.model_size * config.dp)
    view = config.dense_view()
    found = reach(H100, view, axes)
    assert (found.size, found.per_node) == (size, per_node)
    nodes = [rank // H100.gpus_per_node for rank in view.members(0, axes)]
    assert found.per_node == nodes.count(0)  # counted one by one


def group(size: int, per_node: int) -> Reach:
    return Reach(machine=H100, size=size, per_node=per_node)


def test_a_ring_over_nodes_has_a_link_of_every_gpu_in_a_node() -> None:
    intra, inter = H100.intra.bandwidth, H100.inter.bandwidth
    assert group(8, 8).bandwidth == intra
    assert group(64, 1).bandwidth == inter
    assert group(16, 2).bandwidth == 2 * inter
    assert group(64, 8).bandwidth == min(intra, 8 * inter)
    slow = replace(H100, intra=replace(H100.intra, bandwidth=inter))
    assert Reach(machine=slow, size=64, per_node=8).bandwidth == inter


def test_collectives() -> None:
    one, many = group(1, 1), group(16, 1)
    assert one.all_gather(1e9) == one.all_reduce(1e9) == one.all_to_all(1e9) == 0
    assert many.all_gather(1e9) == pytest.approx(15 / 16 * 1e9 / H100.inter.bandwidth, rel=0.01)
    assert many.all_reduce(1e9) == 2 * many.all_gather(1e9)
    assert many.all_gather(0) == pytest.approx(4 * H100.inter.latency)  # steps of a tree


def test_sending_a_token_once_to_a_node_spares_the_network() -> None:
    """64 experts' ranks on 8 nodes, 8 choices: by node at most 7 copies leave, on average fewer."""
    away = 8 * (1 - (1 - 1 / 8) ** 8) * (1 - 1 / 8)
    plain, by_node = group(64, 8).all_to_all(8e8), group(64, 8).all_to_all(1e8, nodes=away)
    assert by_node / plain == pytest.approx(away / 7, rel=0.1)
    assert group(8, 8).all_to_all(8e8) < plain / 5  # within a node
