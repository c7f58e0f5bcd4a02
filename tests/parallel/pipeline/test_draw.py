import sys

import pytest

from mcore_parallel.pipeline import Schedule, chunk_times, make_schedule, simulate
from mcore_parallel.pipeline.draw import draw_png, draw_text


def simulated(kind, *sizes, chunks=1, paired=False, **times):
    schedule = make_schedule(kind, *sizes, chunks=chunks, paired=paired)
    return simulate(schedule, chunk_times(schedule, **times))


def test_text_shows_every_action_where_it_runs():
    assert draw_text(simulated("1f1b", 2, 2)).splitlines() == [
        "stage 0 |F0 F1 ......B0--- ...B1--- |",
        "stage 1 |...F0 B0--- F1 B1--- ......|",
    ]
    assert draw_text(simulated("1f1b", 1, 2, paired=True, exchange=1.0)).splitlines() == [
        "stage 0 |F0--- F1+B0--- B1------ |",
    ]
    assert draw_text(simulated("zb-v", 2, 1, chunks=2)).splitlines() == [
        "stage 0 |F0a ........F0b B0b W0b ........B0a W0a |",
        "stage 1 |....F0a F0b ........B0b W0b B0a W0a ....|",
    ]


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_every_action_is_drawn_once(kind):
    chunks = 2 if kind in ("interleaved", "zb-v") else 1
    found = simulated(kind, 12, 13, chunks=chunks, forward=1.3, backward=1.7, weight=0.9)
    lines = draw_text(found).splitlines()
    assert len({len(line) for line in lines}) == 1
    for line, row in zip(lines, found.spans, strict=True):
        labels = line.partition("|")[2].replace(".", " ").replace("-", " ").strip("|").split()
        letters = [f"{'ab'[s.action.chunk]}" if chunks > 1 else "" for s in row]
        wanted = [
            f"{s.action.kind}{s.action.micro_batch}{x}" for s, x in zip(row, letters, strict=True)
        ]
        assert labels == wanted


def test_nothing_to_draw():
    assert draw_text(simulate(Schedule([[], []]))) == "stage 0 ||\nstage 1 ||"


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r'pip install "mcore-parallel\[plot\]"'):
        draw_png(simulated("1f1b", 2, 2), tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_png(tmp_path):
    draw_png(simulated("zb-h1", 3, 4), tmp_path / "folder" / "x.png", title="zb-h1")
    draw_png(simulated("1f1b", 2, 4, paired=True), tmp_path / "folder" / "x.png")
    assert (tmp_path / "folder" / "x.png").read_bytes().startswith(b"\x89PNG")
