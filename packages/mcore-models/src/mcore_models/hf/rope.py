"""Rotary positions in a `config.json`, in the forms that its versions have had.

Since transformers 5 all of it is below `rope_parameters`; before, `rope_theta` stood beside a
`rope_scaling`. What is there already is kept; otherwise the older form is written, which all read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.rules import count_of, give
from mcore_models.parts import RopeConfig

_ORIGINAL = "original_max_position_embeddings"
_COMMON = {"factor": "factor", _ORIGINAL: "original_length"}
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        **_COMMON,
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        **_COMMON,
        **{
            name: name
            for name in (
                *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
                *("attention_factor", "truncate"),
            )
        },
    },
    "longrope": {
        **_COMMON,
        **{"short_factor": "short_factors", "long_factor": "long_factors"},
        "attention_factor": "attention_factor",
    },
}
"""Of each kind of scaling the fields there and in `RopeConfig`."""

_STRETCHED = ("yarn", "longrope")
"""Kinds whose factor, where it is absent, is that by which the length has grown."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions: their base, which share of a head they turn, and how they are scaled.

    Attributes:
        default_base: where it is absent.
        base, share: what the base, and the share that turns, are called outside of
            `rope_parameters`.
        default_share: where it is absent; None in architectures that turn the whole head always.
        default: `rope_parameters` where they are absent.
        original_length: `original_max_position_embeddings` where it is absent, in architectures
            that have it outside.
        aliases: other names of kinds of scaling.
    """

    default_base: float = 10000.0
    base: str = "rope_theta"
    share: str = "partial_rotary_factor"
    default_share: float | None = None
    default: tuple[tuple[str, Any], ...] = ()
    original_length: int | None = None
    aliases: tuple[tuple[str, str], ...] = ()

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `position`, `rope_base` and `rope`."""
        name, given = self._given(config)
        base = given.get("rope_theta", config.get(self.base))
        base = self.default_base if base is None else base
        if type(base) not in (int, float):
            raise ValueError(f"rope_theta={base!r} must be of type float")
        fields["position"], fields["rope_base"] = "rope", float(base)
        self._read_share(config, given, fields)
        kind = self._kind(given)
        if kind not in _FIELDS:
            known = ", ".join(map(repr, _FIELDS))
            raise ValueError(f"{name}.rope_type={kind!r} is not supported: only {known} are")
        if kind != "default":
            give(fields, "rope.scaling", kind)
            for theirs, ours in _FIELDS[kind].items():
                value = self._value(theirs, kind, config, given, fields)
                if value is not None:
                    give(fields, f"rope.{ours}", _checked(f"{name}.{theirs}", value))

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Say it, unless `config` says the same already."""
        whole_head = model.latent is not None and self.default_share is None
        if not model.num_heads and not whole_head:
            return
        if self._says(config, model) and (self.base in config or "rope_parameters" in config):
            return
        own = {theirs for names in _FIELDS.values() for theirs in names}
        kept = {k: v for k, v in self._given(config)[1].items() if k not in {*own, "type"}}
        wanted = self._wanted(model)
        if config.get("rope_parameters") is not None:
            kept |= {**wanted, "rope_theta": model.rope_base}
            if self.default_share is not None:
                kept["partial_rotary_factor"] = self._share_of(model)
            config["rope_parameters"] = kept
            config.pop("rope_scaling", None)
        else:
            config[self.base] = model.rope_base
            # Null would be the default, which may be scaled.
            config["rope_scaling"] = wanted if model.rope.scaling or self.default else None
            if self.default_share is not None:
                config[self.share] = self._share_of(model)
        if self.original_length is not None and model.rope.original_length is not None:
            config[_ORIGINAL] = model.rope.original_length

    def _given(self, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        # Where both are there, transformers takes `rope_scaling`.
        found = "rope_parameters", dict(self.default)
        for name in ("rope_parameters", "rope_scaling"):
            given = config.get(name)
            if given is None:
                continue
            if not isinstance(given, Mapping):
                raise ValueError(f"{name}={given!r} is no object")
            if any(isinstance(value, Mapping) for value in given.values()):
                raise ValueError(f"{name}={given!r} differs between layers, which is not supported")
            if given:
                found = name, dict(given)
        return found

    def _kind(self, given: Mapping[str, Any]) -> str:
        kind = given.get("rope_type", given.get("type", "default"))
        if not isinstance(kind, str):
            raise ValueError(f"rope_type={kind!r} must be of type str")
        return dict(self.aliases).get(kind, kind)

    def _read_share(
        self, config: Mapping[str, Any], given: Mapping[str, Any], fields: dict[str, Any]
    ) -> None:
        share = given.get("partial_rotary_factor", config.get(self.share))
        share = (self.default_share or 1.0) if share is None else share
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise ValueError(f"{self.share}={share!r} must be greater than 0 and at most 1")
        if share == 1:
            return
        if self.default_share is None:
            raise ValueError(f"{self.share}={share!r} is not supported: only 1.0 is")
        give(fields, "rope.rotary_dim", int(_head_size(fields) * share))

    def _value(
        self,
        theirs: str,
        kind: str,
        config: Mapping[str, Any],
        given: Mapping[str, Any],
        fields: Mapping[str, Any],
    ) -> Any:
        value = given.get(theirs)
        if theirs == _ORIGINAL:
            if self.original_length is not None:
                return count_of(config, _ORIGINAL, self.original_length, least=1)
            return fields["max_positions"] if value is None else value
        if theirs == "factor" and value is None and kind in _STRETCHED:
            original = self._value(_ORIGINAL, kind, config, given, fields)
            if type(original) not in (int, float) or not original > 0:
                raise ValueError(f"{_ORIGINAL}={original!r} must be a number greater than 0")
            return fields["max_positions"] / original
        return value

    def _wanted(self, model: ModelConfig) -> dict[str, Any]:
        kind = model.rope.scaling or "default"
        named = {theirs: getattr(model.rope, ours) for theirs, ours in _FIELDS[kind].items()}
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in named.items()}
        return {"rope_type": kind, **{k: v for k, v in values.items() if v is not None}}

    def _share_of(self, model: ModelConfig) -> float:
        size, turned = model.head_size, model.rotary_size
        share = turned / size
        return share if int(size * share) == turned else (turned + 0.5) / size

    def _says(self, config: Mapping[str, Any], model: ModelConfig) -> bool:
        read: dict[str, Any] = {
            "head_dim": model.head_size,
            "max_positions": model.max_positions,
        }
        try:
            self.read(config, read)
            said = RopeConfig(**read.get("rope", {}))
        except ValueError:
            return False
        turned = said.rotary_dim or model.head_size
        same = turned == model.rotary_size and read["rope_base"] == model.rope_base
        return same and _scaling(said) == _scaling(model.rope)


def _scaling(rope: RopeConfig) -> dict[str, Any]:
    named = {ours for names in _FIELDS.values() for ours in names.values()}
    return {name: getattr(rope, name) for name in ("scaling", *sorted(named))}


def _head_size(fields: Mapping[str, Any]) -> int:
    heads = fields.get("num_heads", 0)
    size: int = fields.get("head_dim") or fields["hidden_size"] // max(heads, 1)
    return size


def _checked(name: str, value: Any) -> Any:
    """Return a number, a truth, or where there is one for each pair numbers; ValueError else."""
    if name.endswith(_LISTS):
        if not isinstance(value, list) or any(type(x) not in (int, float) for x in value):
            raise ValueError(f"{name}={value!r} must be a list of numbers")
        return tuple(map(float, value))
    if type(value) not in (int, float, bool):
        raise ValueError(f"{name}={value!r} must be a number")
    return value


_LISTS = (".short_factor", ".long_factor")
