"""Pictures of corpora, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_BINS: Final = 60


def draw_lengths(
    lengths: Mapping[str, NDArray[np.integer[Any]]], out: str | Path, *, seq_length: int
) -> None:
    """Draw how long the documents of each file are into the PNG `out`.

    Above the share of documents by their tokens, below the share of tokens that lie in documents of
    that length; a line marks `seq_length`.

    Args:
        lengths: tokens of every document, by the name of the file.
        out: the picture.
        seq_length: tokens of a sample.

    Raises:
        ValueError: matplotlib is not installed, or no document has a token.

    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            'a PNG needs matplotlib: pip install "mcore-data[plot]", or leave it out'
        ) from None
    there = {name: values[values > 0] for name, values in lengths.items()}
    there = {name: values for name, values in there.items() if len(values)}
    if not there:
        raise ValueError(f"no document of {', '.join(lengths)} has a token: nothing to draw")
    longest = max(int(values.max()) for values in there.values())
    edges = np.geomspace(1, max(longest, seq_length) + 1, _BINS + 1)
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1, sharex=True)
    for name, values in there.items():
        text = (
            f"{name}: {len(values):,}, median {np.median(values):,.0f}, mean {values.mean():,.0f}"
        )
        for place, weights in enumerate((None, values)):
            shares, _ = np.histogram(values, edges, weights=weights)
            axes[place].stairs(shares / shares.sum(), edges, label=text, linewidth=1.4)
    for place, what in enumerate(("documents", "tokens")):
        axes[place].axvline(seq_length, color="#444444", linestyle="--", linewidth=1)
        axes[place].set_ylabel(f"share of {what}")
        axes[place].grid(alpha=0.25)
    axes[0].set_xscale("log")
    axes[0].set_title(f"Length of documents; dashed: a sample of {seq_length:,} tokens")
    axes[0].legend(fontsize=8)
    axes[1].set_xlabel("tokens of a document")
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
