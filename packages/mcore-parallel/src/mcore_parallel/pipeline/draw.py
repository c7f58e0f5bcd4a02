"""Pictures of a simulated schedule: as text, and as a PNG where matplotlib is installed."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from mcore_parallel.pipeline.actions import Action
from mcore_parallel.pipeline.simulation import Simulation, Span

_COLOURS = {"F": "#7aa6c2", "B": "#e3a857", "W": "#8cb369"}
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}


def draw_text(found: Simulation) -> str:
    """Return one line for each stage, time running to the right.

    Every action begins with its kind, micro-batch and (where a stage has several chunks) a letter
    for the chunk, and goes on in dashes; dots are idle time, a plus joins a pair. The shortest
    action has just room for its label, so lines are as long as the schedule.
    """
    spans = [span for row in found.spans for span in row]
    several = _several(found)
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    room = max((len(_text(span, several)) for span in spans), default=1) + 1
    scale = room / shortest
    width = round(found.makespan * scale)
    margin = len(f"stage {len(found.spans) - 1}")
    lines = []
    for stage, row in enumerate(found.spans):
        cells = ["."] * width
        for span in row:
            start, end = round(span.start * scale), round(span.end * scale)
            room = max(0, end - start)
            cells[start:end] = (_text(span, several).ljust(room - 1, "-") + " ")[:room]
        lines.append(f"{f'stage {stage}':<{margin}} |{''.join(cells)}|")
    return "\n".join(lines)


def draw_png(found: Simulation, out: Path, *, title: str = "") -> None:
    """Draw the same picture into the file `out`; shades tell chunks apart.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError(
            'a PNG needs matplotlib: pip install "mcore-parallel[plot]", or draw as text'
        ) from error
    several = _several(found)
    figure = Figure(
        figsize=(
            min(40.0, 3 + 0.28 * max(len(row) for row in found.spans)),
            1 + len(found.spans) / 2,
        ),
        dpi=100,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    kinds: set[str] = set()
    shades = 1 + max((a.chunk for row in found.spans for span in row for a in _of(span)), default=0)
    for stage, row in enumerate(found.spans):
        for span in row:
            height = 0.9 / len(_of(span))  # the two of a pair lie one above the other
            for place, action in enumerate(_of(span)):
                kinds.add(action.kind)
                middle = stage + (place + 0.5) * height - 0.45
                style = _style(action, shades)
                axes.barh(middle, span.end - span.start, left=span.start, height=height, **style)
                x, text = (span.start + span.end) / 2, _label(action, several)[1:]
                axes.text(x, middle, text, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(found.spans)), [f"stage {s}" for s in range(len(found.spans))])
    axes.set_xlim(0, found.makespan)
    axes.invert_yaxis()
    axes.set_xlabel("time")
    axes.set_title(f"{title} bubble {found.bubble_fraction:.1%}".strip())
    handles = [Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in "FBW" if kind in kinds]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


def _of(span: Span) -> tuple[Action, ...]:
    return (span.action,) if span.beside is None else (span.action, span.beside)


def _several(found: Simulation) -> bool:
    return any(action.chunk for row in found.spans for span in row for action in _of(span))


def _style(action: Action, shades: int) -> dict[str, Any]:
    alpha = 1.0 - 0.6 * action.chunk / shades
    return {"color": _COLOURS[action.kind], "alpha": alpha, "edgecolor": "white"}


def _text(span: Span, several: bool) -> str:
    return "+".join(_label(action, several) for action in _of(span))


def _label(action: Action, several: bool) -> str:
    letters = string.ascii_lowercase
    chunk = letters[action.chunk % len(letters)] if several else ""
    return f"{action.kind}{action.micro_batch}{chunk}"
