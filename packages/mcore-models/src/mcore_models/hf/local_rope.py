"""Rotary positions with a base of their own, and without scaling, in the layers with a window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import give

_FULL, _LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LocalRope:
    """`Rope` of full layers, and the base of those with a window.

    Since transformers 5 each kind of layer has its own part of `rope_parameters`; before, all else
    was about full layers. What is there already is kept; otherwise the older form is written, if it
    can say it.

    Attributes:
        full: of full layers.
        local_base: the base of the others where it is absent.
        local: what it is called outside of `rope_parameters`, if anything.
    """

    full: Rope
    local_base: float
    local: str | None = None

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set what `Rope` does, and `attention.local_rope_base`."""
        full, local = self._parts(config)
        self.full.read(full, fields)
        kind = local.get("rope_type", "default")
        if kind != "default":
            raise ValueError(
                f"rope_parameters.{_LOCAL}.rope_type={kind!r} is not supported: only 'default' is"
            )
        base = local.get("rope_theta")
        base = self.local_base if base is None else base
        if type(base) not in (int, float):
            raise ValueError(f"{self.local or 'rope_theta'}={base!r} must be of type float")
        if fields.get("attention", {}).get("window") is not None:
            give(fields, "attention.local_rope_base", float(base))

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Say it, unless `config` says the same already."""
        full, local = self._parts(config)
        base = model.attention.local_rope_base
        is_other = base is not None and local.get("rope_theta", self.local_base) != base
        if is_other:
            local["rope_theta"] = base
        if config.get("rope_parameters") is None and not (is_other and self.local is None):
            self.full.write(model, full)
            config |= full
            if is_other and self.local is not None:
                config[self.local] = base
            return
        full = {"rope_parameters": full.get("rope_parameters") or {"rope_type": "default"}}
        self.full.write(model, full)
        own = config.get("rope_parameters") or {}
        parts = {_FULL: full["rope_parameters"], _LOCAL: {"rope_type": "default", **local}}
        config["rope_parameters"] = {**own, **parts}
        for name in _OUTSIDE:
            config.pop(name, None)

    def _parts(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what `Rope` reads of full layers, and the parameters of the others."""
        given = config.get("rope_parameters")
        outside = {name: config[name] for name in _OUTSIDE if name in config}
        if given is None:
            theirs = None if self.local is None else config.get(self.local)
            return outside, {} if theirs is None else {"rope_theta": theirs}
        if not isinstance(given, Mapping):
            raise ValueError(f"rope_parameters={given!r} is no object")
        full, local = (dict(given.get(name) or {}) for name in (_FULL, _LOCAL))
        return {**outside, "rope_parameters": full}, local


_OUTSIDE = ("rope_theta", "rope_scaling")
"""What is said of full layers outside of `rope_parameters`."""
