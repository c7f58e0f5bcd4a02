"""Counts of a run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mcore_data.preprocessing.encode import Encoded

_EXAMPLES: Final = 20  # bad lines that a report quotes


@dataclass(frozen=True, kw_only=True)
class PreprocessReport:
    """What `preprocess` did.

    Attributes:
        outputs: prefixes of the files written.
        documents: documents written.
        tokens: tokens written, EOD tokens included.
        empty: documents left out because they hold no token.
        repaired: documents with invalid UTF-8 or lone surrogates, replaced by U+FFFD.
        bad: lines or files left out because they could not be read.
        bad_lines: the first of those, each with its place and the reason.
        seconds: wall-clock time.

    """

    outputs: tuple[Path, ...]
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    repaired: int = 0
    bad: int = 0
    bad_lines: tuple[str, ...] = ()
    seconds: float = 0.0

    def plus(self, part: Encoded) -> "PreprocessReport":
        """Return the report with one more task counted."""
        return replace(
            self,
            documents=self.documents + sum(len(v.sequences) for v in part.documents.values()),
            tokens=self.tokens + sum(len(v.tokens) for v in part.documents.values()),
            empty=self.empty + part.empty,
            repaired=self.repaired + part.repaired,
            bad=self.bad + len(part.bad),
            bad_lines=(self.bad_lines + part.bad)[:_EXAMPLES],
        )

    def check_written(self) -> None:
        """Raise ValueError when there is no document."""
        if not self.documents:
            first = f"; {self.bad_lines[0]}" if self.bad_lines else ""
            left_out = f"{self.empty} empty, {self.bad} bad"
            raise ValueError(f"{self.outputs[0]}: no document to write ({left_out}{first})")
