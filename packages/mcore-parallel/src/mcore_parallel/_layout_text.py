"""The short text form of a layout, such as "tp=2,pp=2,sp": its items."""

from __future__ import annotations

import difflib

from mcore_parallel.stages import StageLayout

SIZES = ("tp", "cp", "pp", "dp", "ep", "etp")
_SWITCHES = {
    "sp": "sequence_parallel",
    "overlap": "overlap",
    "overlap-experts": "overlap_expert_exchange",
    "count-embedding": "count_embedding",
    "count-loss": "count_loss",
}
_EXAMPLES = {
    "order": "tp-cp-ep-dp-pp",
    "stages": "8+8+7+7",
    "bucket": 40_000_000,
    "schedule": "zb-h1",
    "zero": 1,
    "cp-kind": "all-to-all",
    "dispatch": "all-gather",
}
FIELDS = {
    "bucket": "bucket_size",
    "group": "microbatch_group",
    "first": "first_stage_layers",
    "last": "last_stage_layers",
    "zero": "sharding",
    "replicas": "replicas",
    "cp-kind": "context_kind",
    "dispatch": "dispatcher",
    "lanes": "lanes",
}
_KEYS = (*SIZES, *_SWITCHES, "order", "stages", "schedule", "chunks", *FIELDS)


def parse_item(item: str, key: str, value: str | None) -> tuple[str, object]:
    """Return the field of `ParallelConfig` that `key=value` gives, and its value.

    That of `sharding` is the number of its level. `item` is the text, for errors (ValueError).
    """
    if key in _SWITCHES:
        if value not in (None, "0", "1"):
            raise ValueError(f"layout item {item!r}: {key} is 0 or 1")
        return _SWITCHES[key], value != "0"
    if key not in _KEYS:
        near = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"layout item {item!r}: {hint}valid are {', '.join(_KEYS)}")
    if key == "zero":
        if value not in (None, "0", "1", "2", "3"):
            raise ValueError(f"layout item {item!r}: zero is 0, 1, 2 or 3")
        return "sharding", int(value or "1")
    if not value:
        raise ValueError(
            f"layout item {item!r} needs a value, as in '{key}={_EXAMPLES.get(key, 2)}'"
        )
    if key in ("order", "schedule", "cp-kind", "dispatch"):
        return FIELDS.get(key, key), value
    if key == "stages" and "L" in value:
        return "stage_layers", _counts_of(value)
    try:
        if key == "stages":
            return "stage_layers", tuple(int(count) for count in value.split("+"))
        return FIELDS.get(key, key), int(value)
    except ValueError:
        example = f"{key}={_EXAMPLES.get(key, 2)}"
        raise ValueError(f"layout item {item!r} is not of the form '{example}'") from None


def _counts_of(layout: str) -> tuple[int, ...]:
    parsed = StageLayout.parse(layout)
    if any(parsed.predictions):
        raise ValueError(
            f"stages={layout} places {sum(parsed.predictions)} prediction layers (m), and only "
            f"decoder layers (t) can be placed"
        )
    return parsed.layers
