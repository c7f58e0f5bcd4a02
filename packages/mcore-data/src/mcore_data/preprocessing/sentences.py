"""Cut text into sentences by rules: no model, no data files, nothing lost."""

import re
from typing import Final

_ABBREVIATIONS: Final = frozenset(
    {
        *("mr", "mrs", "ms", "dr", "prof", "rev", "fr", "gen", "col", "capt", "lt", "sgt", "maj"),
        *("hon", "gov", "sen", "rep", "pres", "st", "mt", "ft", "jr", "sr", "inc", "ltd", "co"),
        *("corp", "dept", "univ", "est", "fig", "figs", "eq", "eqs", "sec", "ch", "vol", "nos"),
        *("pp", "ed", "eds", "cf", "vs", "viz", "approx", "al", "e.g", "i.e", "a.k.a", "ca", "jan"),
        *("feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec"),
    }
)
# Either marks that need a blank after them, with what closes quotes and brackets, or those of
# scripts without blanks; then an empty line, which ends a heading or a paragraph. A match is tried
# where a run begins and gives nothing back: else time would grow with the square of long runs.
_END: Final = re.compile(
    r"""(?<![.!?\u2026])(?P<mark>[.!?\u2026]++)["'\u2019\u201d\u00bb)\]]*+\s+"""
    r"""|[\u3002\uff01\uff1f\uff61]+["'\u2019\u201d\u300d\u300f\uff09]*\s*"""
    r"""|(?<![\u0964\u0965\u06d4\u061f])[\u0964\u0965\u06d4\u061f]++\s+"""
    r"""|(?<![^\S\n])[^\S\n]*+\n\s*\n\s*"""
)
_WORD: Final = re.compile(r"[^\s(\[\"'\u2018\u201c\u00ab]*$")
_LOOKED_AT: Final = 40  # characters before a full stop, which hold the word that it ends


def split_sentences(text: str) -> list[str]:
    """Return the sentences of `text`, blanks after one included: joined they are the text.

    A sentence ends at `.`, `!`, `?` or an ellipsis before a blank, at their like in scripts that
    write no blanks, and at an empty line. A full stop does not end one after a common English
    abbreviation or an initial, nor any mark where a small letter follows.
    """
    parts = []
    begin = 0
    for match in _END.finditer(text):
        if match["mark"] is not None and not _ends(text, match):
            continue
        parts.append(text[begin : match.end()])
        begin = match.end()
    if begin < len(text):
        parts.append(text[begin:])
    return parts


def _ends(text: str, match: re.Match[str]) -> bool:
    if match.end() < len(text) and text[match.end()].islower():
        return False
    if match["mark"] != ".":
        return True
    start = match.start("mark")
    found = _WORD.search(text, max(0, start - _LOOKED_AT), start)
    word = found[0] if found else ""
    initial = len(word) == 1 and word.isupper() and word != "I"
    return not initial and word.lower() not in _ABBREVIATIONS
