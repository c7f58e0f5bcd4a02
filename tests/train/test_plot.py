import json
from pathlib import Path

import pytest

from mcore_train.plot import plot_losses


def test_picture_of_a_run(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 5 - i / 10} for i in range(1, 20)]
    rows += [{"step": 10, "validation_loss": 4.5}, {"step": 19, "validation_loss": 3.5}]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 20, "lo')
    plot_losses(metrics, tmp_path / "a" / "loss.png", lines={"unigram entropy": 4.0})
    assert (tmp_path / "a" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training loss"):
        plot_losses(tmp_path / "none.jsonl", tmp_path / "x.png")
