"""All operators of one model, chosen together."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from typing import cast

from mcore_kernels.config import KernelConfig
from mcore_kernels.protocols import (
    ActivationOp,
    AdamOp,
    AddRmsNormOp,
    AttentionOp,
    CausalConv1dOp,
    Fp8GroupedOp,
    Fp8MatmulOp,
    GatedDeltaRuleOp,
    GeluOp,
    GluOp,
    GradStatsOp,
    GroupedLinearOp,
    L2NormOp,
    LayerNormOp,
    LinearOp,
    MoePermuteOp,
    MoeRouteOp,
    PagedAttentionOp,
    QuantizeOp,
    RmsNormOp,
    RopeOp,
    SampleOp,
    SsdScanOp,
    SwigluOp,
    VocabLossOp,
)
from mcore_kernels.registry import Resolved, resolve
from mcore_kernels.target import Target


@dataclass(frozen=True, repr=False)
class Kernels:
    """The resolved operators for one configuration and target; modules keep what they need of it.

    Example: `Kernels(KernelConfig(), Target.of("cpu")).rms_norm(x, weight, eps)`. Every field is
    a `Resolved` that satisfies the operator's protocol; it is copied and pickled by name.

    Raises:
        ValueError: a choice of the configuration cannot run on the target (with the reason).
    """

    config: KernelConfig = field(default_factory=KernelConfig)
    target: Target = field(default_factory=Target)
    linear: LinearOp = field(init=False, compare=False)
    rms_norm: RmsNormOp = field(init=False, compare=False)
    add_rms_norm: AddRmsNormOp = field(init=False, compare=False)
    layer_norm: LayerNormOp = field(init=False, compare=False)
    l2_norm: L2NormOp = field(init=False, compare=False)
    swiglu: SwigluOp = field(init=False, compare=False)
    glu: GluOp = field(init=False, compare=False)
    gelu: GeluOp = field(init=False, compare=False)
    activation: ActivationOp = field(init=False, compare=False)
    rope: RopeOp = field(init=False, compare=False)
    attention: AttentionOp = field(init=False, compare=False)
    paged_attention: PagedAttentionOp = field(init=False, compare=False)
    cross_entropy: VocabLossOp = field(init=False, compare=False)
    moe_route: MoeRouteOp = field(init=False, compare=False)
    moe_permute: MoePermuteOp = field(init=False, compare=False)
    grouped_linear: GroupedLinearOp = field(init=False, compare=False)
    causal_conv1d: CausalConv1dOp = field(init=False, compare=False)
    ssd_scan: SsdScanOp = field(init=False, compare=False)
    gated_delta_rule: GatedDeltaRuleOp = field(init=False, compare=False)
    quantize: QuantizeOp = field(init=False, compare=False)
    fp8_matmul: Fp8MatmulOp = field(init=False, compare=False)
    fp8_grouped: Fp8GroupedOp = field(init=False, compare=False)
    adam: AdamOp = field(init=False, compare=False)
    grad_stats: GradStatsOp = field(init=False, compare=False)
    sample: SampleOp = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for one in fields(KernelConfig):
            resolved = resolve(one.name, target=self.target, require=self.config.choice(one.name))
            object.__setattr__(self, one.name, resolved)

    def resolved(self) -> dict[str, Resolved]:
        """Operator name → the resolved operator, in a fixed order."""
        return {one.name: cast(Resolved, getattr(self, one.name)) for one in fields(KernelConfig)}

    def choices(self) -> dict[str, str]:
        """Operator name → name of the implementation that was chosen."""
        return {op: resolved.name for op, resolved in self.resolved().items()}

    def digest(self) -> str:
        """A short hash of the choices: equal on every rank of a group, or the ranks disagree.

        Compare it when a model is built: ranks that compute one product with different kernels
        give results that are wrong in the last digits, or hang where a kernel communicates.
        """
        text = json.dumps(self.choices(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        choices = ", ".join(f"{op}={name}" for op, name in self.choices().items())
        return f"Kernels({self.target.describe()}: {choices})"
