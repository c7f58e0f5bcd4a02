"""Pictures of scaling, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PARTS = {
    "compute": ("#7aa6c2", ("products", "attention", "streaming")),
    "tensor and context parallel": ("#e3a857", ("tp", "cp")),
    "exchange with experts": ("#c26d6d", ("ep",)),
    "waiting for other stages, messages": ("#b0b0b0", ("bubble", "pp")),
    "data parallel, optimizer": ("#8cb369", ("dp", "optimizer")),
}


def draw_scaling(found: dict[str, Any], out: Path) -> None:
    """Draw utilisation over GPUs, and what the time is spent on, into the PNG file `out`.

    found: as `mcore-parallel scaling --json` prints it.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            'a PNG needs matplotlib: pip install "mcore-parallel[plot]", or read the table'
        ) from error
    rows = found["rows"]
    places = range(len(rows))
    figure = Figure(figsize=(11, 4.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    reached = [100 * row["utilization"] for row in rows]
    left.plot(places, reached, marker="o", color="#33658a")
    left.set_ylim(0, 1.15 * max(reached))
    left.set_ylabel("model FLOPs utilisation, % of the bf16 peak")
    below = [0.0] * len(rows)
    for label, (colour, names) in _PARTS.items():
        shares = [100 * sum(row["seconds"][name] for name in names) / row["step"] for row in rows]
        if any(share > 0.05 for share in shares):
            right.bar(places, shares, bottom=below, color=colour, label=label, width=0.7)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    right.set_ylabel("% of a step")
    right.set_ylim(0, 100)
    right.legend(fontsize=8, loc="lower left")
    for axes in (left, right):
        axes.set_xticks(places, [f"{row['world']:,}" for row in rows], fontsize=8)
        axes.set_xlabel("GPUs")
    batch = "batch growing with the GPUs" if found["batch"] == "growing" else "batch fixed"
    figure.suptitle(f"{found['model']} on {found['machine']}, {batch}")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", metadata={"Software": None})
