"""Which linear layers a run multiplies in few bits, and how."""

from dataclasses import dataclass, field

from mcore_kernels.quant import Fp8Recipe, MicroscalingRecipe, PrecisionRules
from mcore_models import ModelConfig
from mcore_train.checks import require as _require


@dataclass(frozen=True, kw_only=True)
class LowPrecisionConfig:
    """Products of linear layers in few bits; weights and everything else keep `precision`.

    `recipe` is that of all linear layers whose modules match one of `modules`
    (`layers.3.attention.qkv`, `layers.3.mlp.down` and so on; `*` stands for any text, also with
    dots), but for those that match one of `keep` and for the `first` and `last` layers, with which
    the depths of multi-token prediction behind the last are left out. The head is never among them,
    nor are routers; the products of experts are (`layers.*.experts.*`).
    `microscaling` takes the place of `recipe`: formats of Blackwell, emulated, and not of experts.
    `emulate` computes the same numbers where the device cannot multiply so.
    """

    recipe: Fp8Recipe = field(default_factory=Fp8Recipe)
    microscaling: MicroscalingRecipe | None = None
    modules: tuple[str, ...] = ("*",)
    keep: tuple[str, ...] = ()
    first: int = 0
    last: int = 0
    emulate: bool = False

    def __post_init__(self) -> None:
        _require(
            bool(self.modules),
            "low_precision.modules is empty: name linear layers, such as layers.*.mlp.*",
        )
        _require(
            self.microscaling is None or self.recipe == Fp8Recipe(),
            "low_precision.recipe would not be used beside low_precision.microscaling: give one",
        )
        for name in ("first", "last"):
            value = getattr(self, name)
            _require(value >= 0, f"low_precision.{name}={value} must be at least 0")

    @property
    def chosen(self) -> Fp8Recipe | MicroscalingRecipe:
        """The recipe."""
        return self.recipe if self.microscaling is None else self.microscaling

    def check(self, model: ModelConfig) -> None:
        """ValueError where the model has no such first and last layers."""
        count, layers = self.first + self.last, model.num_layers
        _require(
            count < layers or count == 0,
            f"low_precision.first={self.first} and low_precision.last={self.last} keep all of the "
            f"{layers} layers: together at most {layers - 1}",
        )
        _require(
            count == 0 or model.t5 is None,
            "low_precision.first and last count the layers of one stack, and t5 has two: name them "
            "by low_precision.keep, such as encoder.layers.0.*",
        )

    def rules(self, model: ModelConfig) -> PrecisionRules:
        """The rules for the modules of a model; what decides stands first."""
        ends = (*range(self.first), *range(model.num_layers - self.last, model.num_layers))
        kept = (*self.keep, *(f"layers.{index}.*" for index in ends))
        if self.last and model.mtp is not None:
            kept = (*kept, "mtp.*")
        return PrecisionRules(
            recipes={"low": self.chosen},
            rules=(
                *((pattern, None) for pattern in kept),
                *((pattern, "low") for pattern in self.modules),
            ),
        )
