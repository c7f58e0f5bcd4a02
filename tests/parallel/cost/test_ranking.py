import time
from dataclasses import replace

import pytest

from mcore_parallel import ParallelConfig
from mcore_parallel.cost import Planner, Workload, ladder, layouts, machine, rank, shape

H100 = machine("h100")


def test_the_best_is_the_best_of_all_that_fit() -> None:
    planner = Planner(shape("llama3-8b-8layers"), H100, 8)
    work = Workload(batch=32, seq_length=4096)
    ranking = rank(planner, work, keep=5)
    steps = [one.step for one in ranking.best]
    assert steps == sorted(steps)
    assert all(one.fits for one in ranking.best)
    every = []
    tried = 0
    for config, micro_batch in layouts(planner, 4096):
        for recompute in ladder(planner.shape):
            try:
                asked = replace(work, micro_batch=micro_batch, recompute=recompute)
                found = planner.estimate(config, asked, simulated=False)
            except ValueError:
                continue
            tried += recompute == "none"
            every += [found.step] * found.fits
    assert ranking.tried == tried
    assert ranking.best[0].step == pytest.approx(min(every), rel=0.02)


def test_layouts_are_valid_and_different() -> None:
    planner = Planner(shape("mixtral-8x7b"), H100, 64)
    found = list(layouts(planner, 8192))
    assert len(set(found)) == len(found) > 500
    for config, _ in found:
        resolved = config.resolve(64)
        assert resolved.ep <= 8
        assert resolved.cp <= 8
        assert resolved.sequence_parallel == (resolved.tp > 1)
    assert {config.ep for config, _ in found} == {1, 2, 4, 8}
    zero_bubble = [config for config, _ in layouts(planner, 8192, ["zb-h1", "zb-v"])]
    assert {"zb-h1", "zb-v"} <= {config.schedule for config in zero_bubble}


def test_little_memory_makes_it_recompute_and_at_last_give_up() -> None:
    model, work = shape("llama3-8b-8layers"), Workload(batch=16, seq_length=8192)
    fast = rank(Planner(model, H100, 8), work, keep=1)
    small = replace(H100, memory=11 * 2**30)
    slow = rank(Planner(model, small, 8), work, keep=1)
    assert slow.best[0].step > fast.best[0].step
    assert slow.best[0].peak_memory <= small.memory
    assert slow.too_large > fast.too_large
    with pytest.raises(ValueError, match=r"no layout fits 8 GPUs.* needs \d+ GiB of 4; use more"):
        rank(Planner(model, replace(H100, memory=4 * 2**30), 8), work)
    with pytest.raises(ValueError, match=r"no layout of 7 GPUs .* use batch 7"):
        rank(Planner(model, H100, 7), Workload(batch=3, seq_length=8192))


def test_a_thousand_layouts_of_16384_gpus_take_seconds() -> None:
    planner = Planner(shape("llama-3-405b"), H100, 16384)
    start = time.process_time()
    ranking = rank(planner, Workload(batch=2048, seq_length=8192), keep=1)
    assert ranking.tried > 1000
    assert time.process_time() - start < 20  # 1 to 2 on an idle machine
    published = ParallelConfig.parse(
        "tp=8 pp=16 sp schedule=interleaved chunks=8 count-embedding count-loss"
    )
    work = Workload(batch=2048, seq_length=8192, recompute="norm+act")
    assert ranking.best[0].step < planner.estimate(published, work).step
