"""Small two-way rules between the fields of a `config.json` and those of a `ModelConfig`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from mcore_models.config import ModelConfig


class _Required(Enum):
    VALUE = "required"


REQUIRED = _Required.VALUE
"""The default of a field that has none: a `config.json` without it is refused."""

IN_FORCE = {"num_kv_heads": "kv_heads", "head_dim": "head_size", "ffn_size": "mlp_size"}
"""Properties with the value in force of fields that may be None."""


class Rule(Protocol):
    """Says how one or a few fields are read and written."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Add to the arguments of `ModelConfig` what `config` says.

        Raises:
            ValueError: a field is missing or not supported; names it.
        """
        ...

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set the fields of `config`, which may have other values already."""
        ...


def in_force(model: ModelConfig, field: str) -> Any:
    """The value of a field of `ModelConfig`, or what is in force where it is None."""
    return getattr(model, IN_FORCE.get(field, field))


def put(config: dict[str, Any], name: str, value: Any) -> None:
    """Set a field that says something else; one that says the same keeps its spelling (1, 1.0)."""
    if name not in config or config[name] != value:
        config[name] = value


@dataclass(frozen=True)
class Field:
    """A field that both have, of type `kind` (int, float or bool); absent or null is `default`."""

    theirs: str
    ours: str
    kind: type
    default: Any = REQUIRED

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Take the value over."""
        value = config.get(self.theirs)
        if value is None:
            if self.default is REQUIRED:
                raise ValueError(f"{self.theirs} is missing")
            fields[self.ours] = self.default
            return
        known = (int, float) if self.kind is float else (self.kind,)
        if type(value) not in known:
            raise ValueError(f"{self.theirs}={value!r} must be of type {self.kind.__name__}")
        fields[self.ours] = self.kind(value)

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Write the value in force."""
        put(config, self.theirs, in_force(model, self.ours))


@dataclass(frozen=True)
class Only:
    """A field of theirs that is supported with one value alone; absent is `absent`."""

    theirs: str
    value: Any
    absent: Any = None

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Check the value."""
        value = config.get(self.theirs, self.absent)
        if value != self.value:
            raise ValueError(f"{self.theirs}={value!r} is not supported: only {self.value!r} is")

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Write the value, unless it is that of a field that is absent."""
        if self.value != self.absent or self.theirs in config:
            put(config, self.theirs, self.value)


@dataclass(frozen=True)
class Ours:
    """A field of `ModelConfig` with one value in the whole architecture."""

    ours: str
    value: Any

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set it."""
        fields[self.ours] = self.value

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Nothing: theirs does not say it."""


@dataclass(frozen=True)
class AllBiases:
    """Biases everywhere or nowhere, from `attention_bias` (q, k, v and o) and `mlp_bias`."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `linear_bias`."""
        attention, mlp = (config.get(name) or False for name in ("attention_bias", "mlp_bias"))
        if type(attention) is not bool or type(mlp) is not bool or attention != mlp:
            raise ValueError(
                f"attention_bias={attention!r} with mlp_bias={mlp!r} is not supported: linear "
                f"layers have biases all of them or none"
            )
        fields["linear_bias"] = attention

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set both."""
        for name in ("attention_bias", "mlp_bias"):
            put(config, name, model.linear_bias)


def _plain_rope(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what `name` says of rotary positions that are not scaled; {} when it is absent."""
    given = {} if config.get(name) is None else config[name]
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}={given!r} is no object")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(f"{name}={given!r} differs between layers, which is not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{name}.rope_type={kind!r} is not supported: only 'default' is")
    return given


@dataclass(frozen=True)
class Rope:
    """Plain rotary positions over the whole head; scaled or partial ones are refused.

    The base is `rope_parameters.rope_theta` (transformers 5) or `rope_theta` beside a
    `rope_scaling` (before). Absent, it is `default_base`.
    """

    default_base: float = 10000.0

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `position` and `rope_base`."""
        # Where both are there, transformers takes `rope_scaling`.
        parameters = _plain_rope(config, "rope_parameters")
        given = _plain_rope(config, "rope_scaling") or parameters
        share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if share not in (None, 1):
            raise ValueError(f"partial_rotary_factor={share!r} is not supported: only 1.0 is")
        base = given.get("rope_theta", config.get("rope_theta"))
        base = self.default_base if base is None else base
        if type(base) not in (int, float):
            raise ValueError(f"rope_theta={base!r} must be of type float")
        fields["position"], fields["rope_base"] = "rope", float(base)

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set the base, where `config` has it already; else as `rope_theta`, which all read."""
        if config.get("rope_parameters") is not None:
            parameters = dict(config["rope_parameters"])
            put(parameters, "rope_theta", model.rope_base)
            config["rope_parameters"] = parameters
        else:
            put(config, "rope_theta", model.rope_base)
