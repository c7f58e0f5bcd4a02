"""Small two-way rules between the fields of a `config.json` and those of a `ModelConfig`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from mcore_models.config import ModelConfig


class _Required(Enum):
    VALUE = "required"


REQUIRED = _Required.VALUE
"""The default of a field that has none: a `config.json` without it is refused."""

IN_FORCE = {
    **{"num_kv_heads": "kv_heads", "head_dim": "head_size"},
    **{"ffn_size": "mlp_size", "mlp_bias": "ffn_bias"},
}
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
    """The value of a field of `ModelConfig`, or what is in force where it is None.

    `moe.top_k` is the field of a part; None where the model has no such part.
    """
    part, dot, name = field.rpartition(".")
    if dot:
        return getattr(getattr(model, part), name, None)
    return getattr(model, IN_FORCE.get(field, field))


def give(fields: dict[str, Any], field: str, value: Any) -> None:
    """Set an argument of `ModelConfig`; `moe.top_k` that of a part."""
    part, dot, name = field.rpartition(".")
    (fields.setdefault(part, {}) if dot else fields)[name] = value


def count_of(config: Mapping[str, Any], name: str, default: int, least: int = 0) -> int:
    """A whole number of `config`, or the default where it is absent or null; ValueError else."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return value


def put(config: dict[str, Any], name: str, value: Any) -> None:
    """Set a field that says something else; one that says the same keeps its spelling (1, 1.0)."""
    if name not in config or config[name] != value:
        config[name] = value


@dataclass(frozen=True)
class Field:
    """A field that both have, of type `kind` (int, float or bool); absent or null is `default`.

    `null` says that null is None all the same, where the default is a number.
    `ours` may be that of a part, `moe.top_k`. `also` are other names that theirs has had; it is
    written under the one that is there.
    """

    theirs: str
    ours: str
    kind: type
    default: Any = REQUIRED
    also: tuple[str, ...] = ()
    null: bool = False

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Take the value over."""
        name = self._name(config)
        value = config.get(name)
        if value is None:
            if self.default is REQUIRED:
                raise ValueError(f"{self.theirs} is missing")
            is_null = self.null and self.theirs in config
            give(fields, self.ours, None if is_null else self.default)
            return
        known = (int, float) if self.kind is float else (self.kind,)
        if type(value) not in known:
            raise ValueError(f"{name}={value!r} must be of type {self.kind.__name__}")
        give(fields, self.ours, self.kind(value))

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Write the value in force."""
        put(config, self._name(config), in_force(model, self.ours))

    def _name(self, config: Mapping[str, Any]) -> str:
        names = (self.theirs, *self.also)
        return next((name for name in names if config.get(name) is not None), self.theirs)


def with_defaults(rules: Iterable[Rule], **defaults: Any) -> tuple[Rule, ...]:
    """Return rules of which some fields, by their names there, have other defaults."""
    rules = tuple(rules)
    changed = {
        rule.theirs: replace(rule, default=defaults[rule.theirs])
        for rule in rules
        if isinstance(rule, Field) and rule.theirs in defaults
    }
    assert changed.keys() == defaults.keys(), f"no rule is about {defaults.keys() - changed.keys()}"
    return tuple(changed.get(getattr(rule, "theirs", ""), rule) for rule in rules)


@dataclass(frozen=True)
class Choice:
    """A field with a few values, `(theirs, ours)` each; absent is the first of them.

    Of several that mean the same the first is written, unless another is there already.
    """

    theirs: str
    ours: str
    values: tuple[tuple[Any, Any], ...]

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Take over what the value means."""
        value = config.get(self.theirs)
        value = self.values[0][0] if value is None else value
        for theirs, ours in self.values:
            if value == theirs:
                give(fields, self.ours, ours)
                return
        known = ", ".join(repr(theirs) for theirs, _ in self.values)
        raise ValueError(f"{self.theirs}={value!r} is not supported: only {known}")

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Write what means the value in force, if anything does."""
        wanted = in_force(model, self.ours)
        given = config.get(self.theirs, self.values[0][0])
        if (given, wanted) in self.values:
            return
        for theirs, ours in self.values:
            if ours == wanted:
                put(config, self.theirs, theirs)
                return


@dataclass(frozen=True)
class Only:
    """A field of theirs that is supported with one value alone; absent or null is `absent`."""

    theirs: str
    value: Any
    absent: Any = None

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Check the value."""
        value = config.get(self.theirs)
        value = self.absent if value is None else value
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
        give(fields, self.ours, self.value)

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Nothing: theirs does not say it."""


@dataclass(frozen=True)
class Biases:
    """Biases of attention, from `attention_bias`, and of the MLP, from the field that `mlp` names.

    output: whether that of attention is about its output projection, too, which otherwise has none.
    """

    output: bool = True
    mlp: str | None = None
    default: bool = False

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set which linear layers have one."""
        attention = self._flag(config, "attention_bias", self.default)
        give(fields, "attention_bias", attention)
        give(fields, "attention.output_bias", attention and self.output)
        give(fields, "mlp_bias", self.mlp is not None and self._flag(config, self.mlp, False))

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set both."""
        put(config, "attention_bias", model.qkv_bias)
        if self.mlp is not None:
            put(config, self.mlp, model.ffn_bias)

    def _flag(self, config: Mapping[str, Any], name: str, default: bool) -> bool:
        value = config.get(name)
        if value is not None and type(value) is not bool:
            raise ValueError(f"{name}={value!r} must be of type bool")
        return default if value is None else value


@dataclass(frozen=True)
class Power:
    """A number that is a power of theirs, such as the inverse of a square root.

    Where ours is None it is `head_size` to the power -½, the scale of attention scores.
    """

    theirs: str
    ours: str
    default: float
    power: float

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set it."""
        value = config.get(self.theirs)
        value = self.default if value is None else value
        if type(value) not in (int, float) or not value > 0:
            raise ValueError(f"{self.theirs}={value!r} must be a number greater than 0")
        give(fields, self.ours, float(value) ** self.power)

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set theirs, as a whole number if it is one."""
        wanted = in_force(model, self.ours)
        if wanted is None and not model.num_heads:
            return
        wanted = model.head_size**-0.5 if wanted is None else wanted
        current = config.get(self.theirs, self.default)
        if type(current) not in (int, float) or float(current) ** self.power != wanted:
            value = wanted ** (1 / self.power)
            whole = round(value)
            config[self.theirs] = whole if whole and whole**self.power == wanted else value
