"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mcore_train.callbacks.log import read_metrics


def plot_losses(
    metrics: Path, out: Path, *, lines: Mapping[str, float] | None = None, title: str = "Loss"
) -> None:
    """Draw training and validation loss of a `metrics.jsonl` into the PNG `out`.

    `lines` are drawn across with their names, e.g. the entropy of the validation text.

    Raises:
        ValueError: the file holds no training loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    validation = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if not train:
        raise ValueError(f"{metrics}: no training loss to draw")
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), color="#9db4c0", linewidth=1, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="#d1495b", marker="o", label="validation")
    for (name, value), style in zip((lines or {}).items(), ("--", ":", "-."), strict=False):
        axes.axhline(value, color="#444444", linestyle=style, linewidth=1)
        axes.annotate(
            f"{name} {value:.2f}",
            (0.995, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper center")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
