"""Norms over the hidden dimension, and over the heads of attention.

T tokens, H hidden, D head size.
"""

from typing import overload

import torch
from torch import Tensor, nn

from mcore_kernels import accumulation_dtype
from mcore_models.common.builder import BuildContext, build_seeded
from mcore_models.config import ModelConfig
from mcore_parallel import (
    GradSync,
    Group,
    Init,
    ParamSpec,
    TensorLayout,
    copy_to_group,
    reduce_from_group,
)
from mcore_parallel.spec import join
from mcore_parallel.tensor import Part, fused_spec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, 2019); [..., H] to [..., H].

    With `zero_centered` x is multiplied by 1 + weight, which starts at 0.
    """

    def __init__(
        self, size: int, *, eps: float, build: BuildContext, zero_centered: bool = False
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        self.param_init = {"weight": _scale_init(zero_centered)}
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))
        self._rms_norm = build.kernels.rms_norm
        self._add_rms_norm = build.kernels.add_rms_norm

    @overload
    def forward(self, hidden: Tensor) -> Tensor: ...

    @overload
    def forward(self, hidden: Tensor, pending: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, hidden: Tensor, pending: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Norm every row; with `pending`, which is added before, also return the sum."""
        centered = self.zero_centered
        if pending is None:
            out: Tensor = self._rms_norm(hidden, self.weight, self.eps, zero_centered=centered)
            return out
        return self._add_rms_norm(pending, hidden, self.weight, self.eps, zero_centered=centered)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) · weight + bias (Ba et al., 2016); [..., H] to [..., H].

    With `zero_centered` x is multiplied by 1 + weight, which starts at 0; `bias` says whether there
    is one.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        build: BuildContext,
        zero_centered: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        self.param_init = {"weight": _scale_init(zero_centered)}
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))
        self.bias: nn.Parameter | None
        if bias:
            # `empty_like` of a meta tensor imports torch's symbolic shapes: a second.
            self.bias = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))
        else:
            self.register_parameter("bias", None)
        self._layer_norm = build.kernels.layer_norm

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm every row."""
        out: Tensor = self._layer_norm(
            hidden, self.weight, self.bias, self.eps, zero_centered=self.zero_centered
        )
        return out


def _scale_init(zero_centered: bool) -> Init:
    return Init(kind="zeros" if zero_centered else "ones")


def build_norm(config: ModelConfig, build: BuildContext, layer_index: int) -> nn.Module:
    """The norm that `config` names, or what the builder called "norm" makes."""
    if "norm" in build.builders:
        return build_seeded(build.builders["norm"], config, build, layer_index, "norm")
    size, eps, centered = config.hidden_size, config.norm_eps, config.zero_centered_norm
    if config.norm == "rms_norm":
        return RMSNorm(size, eps=eps, build=build, zero_centered=centered)
    return LayerNorm(size, eps=eps, build=build, zero_centered=centered, bias=config.norm_bias)


def build_qk_norm(config: ModelConfig, build: BuildContext, heads: int) -> nn.Module | None:
    """The norm of all `heads` queries or keys that `config` asks for: [T, heads here, D] alike."""
    kind, size = config.attention.qk_norm, config.head_size
    eps, centered = config.norm_eps, config.zero_centered_norm
    if kind is None:
        return None
    if kind == "l2":
        return UnitRMSNorm(eps=eps, build=build)
    if kind == "all":
        part = Part("", heads, size)
        return AcrossHeadsRMSNorm(part, eps=eps, build=build, zero_centered=centered)
    if config.norm == "rms_norm":
        return HeadRMSNorm(size, eps=eps, build=build, zero_centered=centered)
    bias = config.norm_bias
    return HeadLayerNorm(size, eps=eps, build=build, zero_centered=centered, bias=bias)


class UnitRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps), without weights; [..., D] to [..., D]."""

    def __init__(self, *, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.eps = eps
        self._rms_norm = build.kernels.rms_norm

    def forward(self, heads: Tensor) -> Tensor:
        """Norm every row."""
        out: Tensor = self._rms_norm(heads, None, self.eps)
        return out


def _specs_of_shared(module: nn.Module, group: Group, prefix: str) -> dict[str, ParamSpec]:
    """The specs of a norm's weights [D] that all heads share.

    Every rank of `group` norms heads of its own: the gradients are shares of sums over it.
    """
    scale = _scale_init(bool(getattr(module, "zero_centered", False)))
    return {
        name: ParamSpec(
            layout=TensorLayout.whole(join(prefix, name), tuple(parameter.shape)).replicated(
                group.rank, group.size
            ),
            init=scale if name == "weight" else Init(kind="zeros"),
            grad_sync=(GradSync(group=group),) if group.size > 1 else (),
        )
        for name, parameter in module.named_parameters(recurse=False)
    }


class HeadRMSNorm(RMSNorm):
    """An RMS norm of every head by itself, with weights [D] that the heads share."""

    def __init__(
        self, size: int, *, eps: float, build: BuildContext, zero_centered: bool = False
    ) -> None:
        super().__init__(size, eps=eps, build=build, zero_centered=zero_centered)
        self._group = build.tp

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The spec of `weight`, global `<prefix>.weight` [D]."""
        return _specs_of_shared(self, self._group, prefix)


class HeadLayerNorm(LayerNorm):
    """A layer norm of every head by itself, with weights [D] that the heads share."""

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        build: BuildContext,
        zero_centered: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(size, eps=eps, build=build, zero_centered=zero_centered, bias=bias)
        self._group = build.tp

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The specs of `weight` and `bias`, global `<prefix>.{weight,bias}` [D]."""
        return _specs_of_shared(self, self._group, prefix)


class AcrossHeadsRMSNorm(nn.Module):
    """An RMS norm over all heads of a token, with a weight for each channel of each head.

    Heads are cut over the tensor-parallel group, over which the squares are summed; a head that
    several ranks hold counts once.
    """

    def __init__(
        self, part: Part, *, eps: float, build: BuildContext, zero_centered: bool = False
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        self._part = part
        self._group = build.tp
        self._rms_norm = build.kernels.rms_norm
        size = part.local_features(build.tp.size)
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))

    def forward(self, heads: Tensor) -> Tensor:
        """[T, heads here, D] alike; computed in fp32 and rounded once."""
        rows, group, centered = heads.flatten(1), self._group, self.zero_centered
        if group.size == 1:
            normed: Tensor = self._rms_norm(rows, self.weight, self.eps, zero_centered=centered)
            return normed.view_as(heads)
        wide = rows.to(accumulation_dtype(rows.dtype))
        total = wide.square().sum(-1, keepdim=True)
        # Each rank goes on with the whole sum, so its gradient is summed as well.
        total = copy_to_group(reduce_from_group(total, group), group)
        count = self._part.features * self._part.num_replicas(group.size)
        weight = self.weight.to(wide.dtype)
        out = wide * torch.rsqrt(total / count + self.eps) * (1 + weight if centered else weight)
        return out.to(rows.dtype).view_as(heads)

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The spec of `weight`, global `<prefix>.weight` [heads · D]."""
        named = {join(prefix, "weight"): self._part}
        return {"weight": fused_spec(named, self._group, init=_scale_init(self.zero_centered))}
