"""Which module multiplies by which recipe, by the pattern of its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mcore_kernels.quant.recipe import Fp8Recipe, MicroscalingRecipe

Recipe = Fp8Recipe | MicroscalingRecipe


@dataclass(frozen=True, kw_only=True)
class PrecisionRules:
    """Recipes by name, and patterns of module names that choose one.

    Attributes:
        recipes: by a name of your own.
        rules: pairs of a pattern ("layers.*.mlp.*", with *, ? and [seq]) and the name of a recipe,
            or None for the model's own dtype. The first that matches decides.
        default: for modules that no pattern matches.

    Raises:
        ValueError: a rule names a recipe that there is not.
    """

    recipes: Mapping[str, Recipe]
    rules: tuple[tuple[str, str | None], ...] = ()
    default: str | None = None

    def __post_init__(self) -> None:
        from mcore_kernels.registry import nearest

        for pattern, name in (*self.rules, ("the default", self.default)):
            if name is not None and name not in self.recipes:
                raise ValueError(
                    f"precision: {pattern}: no recipe {name!r}; {nearest(name, self.recipes)}"
                )

    @staticmethod
    def with_ends(
        recipe: Recipe,
        *,
        num_layers: int,
        first: int = 1,
        last: int = 1,
        layer: str = "layers.{}.*",
        others: tuple[tuple[str, str | None], ...] = (),
    ) -> PrecisionRules:
        """All layers by the recipe but the `first` and the `last` ones, and nothing else by it.

        `layer` is the pattern of a layer's modules with its number as {}; `others` are rules that
        come before.

        Raises:
            ValueError: there are fewer layers than that.
        """
        if first < 0 or last < 0 or first + last > num_layers:
            raise ValueError(
                f"precision: {first} first and {last} last layers of {num_layers} in all"
            )
        ends = (*range(first), *range(num_layers - last, num_layers))
        kept = tuple((layer.format(i), None) for i in ends)
        return PrecisionRules(
            recipes={"layers": recipe}, rules=(*others, *kept, (layer.format("*"), "layers"))
        )

    def of(self, module: str) -> Recipe | None:
        """The recipe of the module of this name; None: the model's own dtype."""
        for pattern, name in self.rules:
            if fnmatchcase(module, pattern):
                return None if name is None else self.recipes[name]
        return None if self.default is None else self.recipes[self.default]

    def check(self, modules: Iterable[str]) -> None:
        """Hold the patterns against the names of all modules.

        Raises:
            ValueError: a pattern matches none of them; the nearest name is given.
        """
        from mcore_kernels.registry import nearest

        names = list(modules)
        for pattern, _ in self.rules:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = nearest(pattern, names) if names else "there are none"
                raise ValueError(f"precision: no module is called {pattern!r}; {close}")
