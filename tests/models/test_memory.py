"""What ranks hold, counted on models without memory."""

from dataclasses import replace

import pytest

from mcore_models import MoEConfig, MTPConfig, build_model, count_parameters, llama
from mcore_models.cli import main
from mcore_models.memory import memory_per_rank, table
from mcore_parallel import ParallelConfig

MODEL = replace(
    llama(vocab_size=64, hidden_size=32, num_layers=4, num_heads=4),
    moe=MoEConfig(num_experts=8, top_k=2, expert_ffn_size=16),
    mtp=MTPConfig(),
)


def test_one_rank_holds_everything() -> None:
    (stage,) = memory_per_rank(MODEL, ParallelConfig(), 1)
    assert stage.layers == (0, 1, 2, 3)
    assert stage.dense + stage.experts == count_parameters(MODEL).total
    assert stage.experts == 5 * 8 * 3 * 32 * 16  # the layer of the further token among them
    assert (stage.parameters, stage.gradients, stage.optimizer) == tuple(
        size * count_parameters(MODEL).total for size in (2, 4, 12)
    )


def test_stages_cut_over_ranks_hold_what_the_built_model_has() -> None:
    layout = ParallelConfig.parse("tp=2,pp=2,ep=4,etp=1,zero=2")
    stages = memory_per_rank(MODEL, layout, 16)
    assert [stage.layers for stage in stages] == [(0, 1), (2, 3)]
    assert [stage.experts for stage in stages] == [n * 2 * 3 * 32 * 16 for n in (2, 3)]
    whole = build_model(replace(MODEL, mtp=None), device="meta")
    shared = {"embedding.weight", "lm_head.weight", "final_norm.weight"}
    layers = [f"layers.{i}." for i in (0, 1)]
    sizes = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    mine = {name: n for name, n in sizes.items() if name.startswith(tuple(layers))}
    cut = sum(n for name, n in mine.items() if ".qkv." in name or ".o." in name)
    kept = sum(n for name, n in mine.items() if "norm" in name or "router" in name)
    assert shared < set(sizes)
    assert stages[0].dense == cut // 2 + kept + sizes["embedding.weight"] // 2
    first = stages[0]
    # dp is 4, and experts lie on 8 / 4 = 2 ranks each.
    assert first.gradients == 4 * (first.dense / 4 + first.experts / 2)
    assert first.optimizer == 3 * first.gradients
    assert first.total == first.parameters + first.gradients + first.optimizer


def test_a_model_of_671_billion_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """Laid out for 2048 ranks without memory; equal stages share a line."""
    argv = ["memory", "deepseek-v3", "--world", "2048", "--layout", "pp=16,ep=64"]
    assert main(argv) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[1:-1]] == ["0", "1-12", "13-14", "15"]
    dense, experts = (
        sum(
            int(row[column].replace(",", "")) * times
            for row, times in zip(rows[1:-1], (1, 12, 2, 1), strict=True)
        )
        for column in (2, 3)
    )
    assert dense + 64 * experts == 671_026_404_352


def test_equal_stages_that_are_no_neighbours_have_lines_of_their_own() -> None:
    stages = memory_per_rank(replace(MODEL, mtp=None), ParallelConfig(pp=4), 4)
    assert stages[1] != stages[0] != stages[3]
    lines = table([stages[1], stages[0], stages[1]]).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "2"]


def test_layouts_that_do_not_fit_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "gpt2", "--world", "8", "--layout", "tp=5"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mcore-models: ")
    assert err.count("\n") == 1
