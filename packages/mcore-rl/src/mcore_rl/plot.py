"""The reward curve as a picture."""

from __future__ import annotations

from pathlib import Path

from mcore_train.callbacks import read_metrics


def plot_rewards(metrics: Path, out: Path, *, title: str = "Reward") -> None:
    """Draw the rewards of a `metrics.jsonl` into the PNG `out`.

    Above the mean reward of each step's rollouts and of the held-out tasks, below the length of the
    responses. A file without a training step gives no picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    steps = [row for row in rows if "reward" in row]
    held_out = [row for row in rows if "held_out_reward" in row]
    if not steps:
        return
    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    x = [row["step"] for row in steps]
    above.plot(x, [row["reward"] for row in steps], color="#9db4c0", label="rollouts")
    if held_out:
        above.plot(
            [row["step"] for row in held_out],
            [row["held_out_reward"] for row in held_out],
            color="#d1495b",
            marker="o",
            label="held-out tasks",
        )
    below.plot(x, [row["response_length"] for row in steps], color="#66717e")
    above.set_ylabel("mean reward")
    above.set_title(title)
    above.legend(loc="lower right")
    below.set_ylabel("tokens")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.25)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
