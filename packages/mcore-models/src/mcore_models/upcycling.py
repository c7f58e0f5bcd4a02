"""From a dense model to one with experts that computes the same (Komatsuzaki et al., 2022).

Every expert begins as the MLP of its layer. What a token's experts are weighed with adds up to 1,
so that whatever the router chooses the sum is what the MLP gives; the router is new.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mcore_models.build import DEFAULT_KEY, build_model
from mcore_models.config import ModelConfig
from mcore_models.parts import MoEConfig
from mcore_parallel import ParamSpec, RngKey
from mcore_parallel.spec import fill_


def upcycled_config(
    dense: ModelConfig, moe: MoEConfig, layers: Collection[int] | None = None
) -> ModelConfig:
    """The architecture with experts in place of the MLPs of `layers`, by default of all.

    Raises:
        ValueError: the model with these experts would not compute the same, or a layer without an
            MLP is named.
    """
    if dense.moe is not None:
        raise ValueError("the model has experts already: only a dense one can be upcycled")
    pattern = dense.layer_pattern
    with_mlp = [i for i, letters in enumerate(pattern) if "-" in letters]
    chosen = with_mlp if layers is None else sorted(set(layers))
    for i in chosen:
        if i not in with_mlp:
            raise ValueError(f"layer {i} has no MLP to make experts of: those with one {with_mlp}")
    if not chosen:
        raise ValueError("no layer has an MLP to make experts of")
    _check_same(dense, moe)
    return replace(
        dense,
        moe=moe,
        pattern=tuple(
            letters.replace("-", "E") if i in chosen else letters
            for i, letters in enumerate(pattern)
        ),
    )


def _check_same(dense: ModelConfig, moe: MoEConfig) -> None:
    wanted = {
        "expert_ffn_size": dense.mlp_size,
        "normalise_top_k": True,
        "scaling_factor": 1.0,
        "shared_ffn_size": 0,
        "latent_size": None,
    }
    for name, value in wanted.items():
        if getattr(moe, name) != value:
            raise ValueError(
                f"moe.{name}={getattr(moe, name)}: experts that are the MLP, and compute the same, "
                f"need {name}={value}"
            )
    if moe.expert_bias not in (None, dense.ffn_bias):
        raise ValueError(f"moe.expert_bias={moe.expert_bias}, and the MLP has {dense.ffn_bias}")


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """The global tensors of a model with experts, from those of the dense one.

    `sources` has for each tensor of `sparse` the one of `dense` that it is or that its experts are;
    None for a new one, whose values come from `key`. `shapes` are those of `sparse`.
    """

    dense: ModelConfig
    sparse: ModelConfig
    key: RngKey = DEFAULT_KEY
    sources: dict[str, str | None] = field(init=False)
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    _specs: dict[str, ParamSpec] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        before = _fragments(self.dense)
        after = _fragments(self.sparse)
        sources = {name: name if name in before else _mlp_of(name, before) for name in after}
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "shapes", {name: shape for name, (shape, _) in after.items()})
        object.__setattr__(self, "_specs", {name: spec for name, (_, spec) in after.items()})

    def tensor(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """The whole tensor of that name; `read` returns one of the dense model."""
        source = self.sources[name]
        if source is None:
            new = torch.zeros(self.shapes[name])
            fill_(new, self._specs[name].layout, self._specs[name].init, self.key)
            return new
        value = read(source)
        return value if source == name else value.expand(self.shapes[name]).contiguous()


def _fragments(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], ParamSpec]]:
    """Shape of every global tensor, and the spec of the parameter that it lies in."""
    specs = build_model(config, device="meta", key=None).specs().values()
    return {f.name: (f.global_shape, spec) for spec in specs for f in spec.layout.fragments}


def _mlp_of(name: str, dense: Collection[str]) -> str | None:
    source = name.replace(".moe.experts.", ".mlp.")
    return source if source in dense else None
