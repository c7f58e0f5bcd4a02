"""Which layers see a window alone: `sliding_window`, and what says where it is in force."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.rules import count_of, give, put

_FULL, _SLIDING = "full_attention", "sliding_attention"


def alternate(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Every second layer is full, the first one sliding."""
    return [i % 2 == 0 for i in range(layers)]


def from_layer(config: Mapping[str, Any], layers: int) -> list[bool]:
    """The layers from `max_window_layers` on are sliding."""
    first = count_of(config, "max_window_layers", 28)
    return [i >= first for i in range(layers)]


@dataclass(frozen=True)
class Windows:
    """A sliding window over all layers, or over those that `layer_types` calls sliding.

    Attributes:
        default: where `sliding_window` is absent; null is none.
        layers: which layers are sliding where `layer_types` is absent; without it all are.
        switch: a field that has to be true for there to be one.
    """

    default: int | None = None
    layers: Callable[[Mapping[str, Any], int], list[bool]] | None = None
    switch: str | None = None

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `attention.window` and `attention.local_layers`."""
        window = config.get("sliding_window", self.default)
        if window is not None and type(window) is not int:
            raise ValueError(f"sliding_window={window!r} must be of type int")
        local = self._local(config, fields["num_layers"])
        if self.switch is not None and not config.get(self.switch, False):
            window = None
        if window is None or not any(local):
            return
        give(fields, "attention.window", window)
        if not all(local):
            layers = tuple(i for i, is_local in enumerate(local) if is_local)
            give(fields, "attention.local_layers", layers)

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set the window, and where it is."""
        window = model.attention.window
        if window is not None or config.get("sliding_window", self.default) is not None:
            self._write_window(window, config)
        if self.layers is None or window is None:
            return
        local = [model.attention.is_local(i) for i in range(model.num_layers)]
        try:
            is_said = self._local(config, model.num_layers) == local
        except ValueError:
            is_said = False
        if not is_said:
            config["layer_types"] = [_SLIDING if is_local else _FULL for is_local in local]

    def _write_window(self, window: int | None, config: dict[str, Any]) -> None:
        if self.switch is not None:
            put(config, self.switch, window is not None)
        if window is not None or self.switch is None:
            put(config, "sliding_window", window)

    def _local(self, config: Mapping[str, Any], layers: int) -> list[bool]:
        if self.layers is None:
            return [True] * layers
        types = config.get("layer_types")
        if types is None:
            return self.layers(config, layers)
        if not isinstance(types, list) or len(types) != layers or {*types} - {_FULL, _SLIDING}:
            raise ValueError(
                f"layer_types={types!r} must be {layers} times {_FULL!r} or {_SLIDING!r}"
            )
        return [kind == _SLIDING for kind in types]
