"""What architectures with recurrent mixers have in common."""

from collections.abc import Iterator, Mapping, Sequence

from mcore_models.config import ModelConfig
from mcore_models.hf.rules import Field, Rule
from mcore_parallel.mapping import Drop, Operator, Rename, Reshape, Split

_DEEPEST = 8


def drop_below(prefix: str) -> Iterator[Operator]:
    """Yield operators that leave out every tensor below `prefix`, as transformers does."""
    for depth in range(1, _DEEPEST):
        yield Drop(".".join([prefix, *(f"{{p{i}}}" for i in range(depth))]))


def conv_operators(
    theirs: str, ours: str, sizes: Mapping[str, int], width: int
) -> Iterator[Operator]:
    """Yield the operators for one convolution `theirs` of all channels, cut into `sizes` of ours.

    There its weight is [channels, 1, width].
    """
    channels = sum(sizes.values())
    yield Reshape(f"{theirs}.weight", (channels, 1, width), (channels, width))
    named = tuple(f"{ours}.{name}_conv.{{kind:weight|bias}}" for name in sizes)
    yield Split(f"{theirs}.{{kind:weight|bias}}", named, tuple(sizes.values()))


def mamba_operators(
    model: ModelConfig, theirs: str, ours: str = "layers.{layer}.mamba"
) -> Iterator[Operator]:
    """Yield the operators for a Mamba-2 mixer, of which `theirs` fuses the projections."""
    mamba = model.mamba
    assert mamba is not None
    inner, shared = mamba.inner_size, mamba.num_groups * mamba.state_size
    sizes = {"z": inner, "x": inner, "b": shared, "c": shared, "dt": mamba.num_heads}
    yield Split(
        f"{theirs}.in_proj.{{kind:weight|bias}}",
        tuple(f"{ours}.{name}.{{kind}}" for name in sizes),
        tuple(sizes.values()),
    )
    convolved = {name: sizes[name] for name in ("x", "b", "c")}
    yield from conv_operators(f"{theirs}.conv1d", ours, convolved, mamba.conv_width)
    for name, own in {"A_log": "a_log", "D": "d", "dt_bias": "dt_bias"}.items():
        yield Rename(f"{theirs}.{name}", f"{ours}.{own}")
    yield Rename(f"{theirs}.norm.weight", f"{ours}.norm.weight")
    yield Rename(f"{theirs}.out_proj.{{kind:weight|bias}}", f"{ours}.out.{{kind}}")


def mamba_fields(names: Mapping[str, str], defaults: Mapping[str, int]) -> Sequence[Rule]:
    """Rules for the sizes of a Mamba-2 mixer: their names, and their defaults, by ours."""
    return [
        Field(theirs, f"mamba.{ours}", int, default=defaults[ours])
        for ours, theirs in names.items()
    ]
