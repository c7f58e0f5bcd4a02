"""Recipes: in which format and with which scales a linear layer multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_kernels.quant.formats import FORMATS, Format
from mcore_kernels.quant.scaling import Block
from mcore_kernels.target import Target

_SCALING = ("tensor", "row", "block")


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """Training in formats of 8 bits.

    Attributes:
        scaling: one scale for the "tensor"; one for each "row" of a factor, along what is summed;
            or in "block"s: 1 × 128 of inputs and gradients, 128 × 128 of weights (DeepSeek-V3,
            arXiv:2412.19437).
        forward_format: of inputs and weights.
        grad_format: of the gradients of outputs; "e5m2" has more range, "e4m3" more digits. None
            takes "e4m3" in blocks, whose scales follow the range, and "e5m2" elsewhere.
        history: 0 takes scales from the tensor at hand; n from the n steps before ("tensor" only).
        latest: of the history, only the latest step rather than the largest of all.
        margin: so many powers of two are left above the largest value.
        power_of_two: scales are powers of two.

    Raises:
        ValueError: an unknown name, or values that exclude each other.
    """

    scaling: str = "tensor"
    forward_format: str = "e4m3"
    grad_format: str | None = None
    history: int = 0
    latest: bool = False
    margin: int = 0
    power_of_two: bool = False

    def __post_init__(self) -> None:
        _one_of("scaling", self.scaling, _SCALING)
        _one_of("forward_format", self.forward_format, FORMATS)
        if self.grad_format is None:
            chosen = "e4m3" if self.scaling == "block" else "e5m2"
            object.__setattr__(self, "grad_format", chosen)
        _one_of("grad_format", str(self.grad_format), FORMATS)
        if self.forward_format == self.grad_format == "e5m2":
            # No GPU multiplies two factors of e5m2.
            raise ValueError("fp8 recipe: e5m2 forward and backward cannot be; use e4m3 for one")
        if self.history < 0:
            raise ValueError(f"fp8 recipe: history must be at least 0, got {self.history}")
        if self.history and self.scaling != "tensor":
            raise ValueError(
                f"fp8 recipe: history={self.history} needs scaling='tensor', got {self.scaling!r}"
            )
        if self.latest and not self.history:
            raise ValueError("fp8 recipe: latest=True needs a history of at least 1 step")

    def format(self, role: str) -> Format:
        """The format of an "input", a "weight" or a "grad"."""
        return FORMATS[str(self.grad_format) if role == "grad" else self.forward_format]

    def block(self, role: str) -> Block:
        """The block of an "input", a "weight" or a "grad"; what is summed lies along the rows."""
        if self.scaling == "tensor":
            return 0, 0
        if self.scaling == "row":
            return 1, 0
        return (128, 128) if role == "weight" else (1, 128)

    def refusal(self, target: Target) -> str | None:
        """None where a GPU multiplies so; else the reason. On other devices it is emulated."""
        needed = (8, 9) if self.scaling == "tensor" else (9, 0)
        return _arch_refusal(target, needed)


@dataclass(frozen=True, kw_only=True)
class MicroscalingRecipe:
    """Training in the block formats of Blackwell.

    Attributes:
        format: "mxfp8" or "nvfp4".

    Raises:
        ValueError: an unknown format.
    """

    format: str = "mxfp8"

    def __post_init__(self) -> None:
        _one_of("format", self.format, ("mxfp8", "nvfp4"))

    def refusal(self, target: Target) -> str | None:
        """The reason why no GPU product of these is here; None where they can be emulated."""
        reason = _arch_refusal(target, (10, 0))
        if reason is None and target.device_type == "cuda":
            return f"{self.format} is emulated only: its product on the device is not written"
        return reason


def _arch_refusal(target: Target, needed: tuple[int, int]) -> str | None:
    if target.device_type != "cuda" or (target.arch is not None and target.arch >= needed):
        return None
    has = "unknown" if target.arch is None else f"{target.arch[0]}.{target.arch[1]}"
    return (
        f"needs compute capability {needed[0]}.{needed[1]} or newer, the target's is {has}; "
        "emulate=True computes the same numbers there"
    )


def _one_of(name: str, value: str, names: object) -> None:
    from mcore_kernels.registry import nearest

    known = list(names)  # type: ignore[call-overload]
    if value not in known:
        raise ValueError(f"recipe: no {name} {value!r}; {nearest(value, known)}")
