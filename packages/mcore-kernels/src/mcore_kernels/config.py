"""Which implementations to use, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mcore_kernels.registry import implementation_named, operator_named

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One choice per operator.

    Each is "auto" (the fastest that can run on the target), the name of an implementation
    ("reference", "triton", …; asking for one that cannot run is an error when it is resolved), or
    the import path "module:attribute" of an `mcore_kernels.Implementation` of your own.

    Raises:
        ValueError: a name that no implementation of the operator has.
    """

    linear: str = AUTO
    rms_norm: str = AUTO
    add_rms_norm: str = AUTO
    layer_norm: str = AUTO
    l2_norm: str = AUTO
    swiglu: str = AUTO
    glu: str = AUTO
    gelu: str = AUTO
    activation: str = AUTO
    rope: str = AUTO
    attention: str = AUTO
    paged_attention: str = AUTO
    cross_entropy: str = AUTO
    moe_route: str = AUTO
    moe_permute: str = AUTO
    grouped_linear: str = AUTO
    causal_conv1d: str = AUTO
    ssd_scan: str = AUTO
    gated_delta_rule: str = AUTO
    quantize: str = AUTO
    fp8_matmul: str = AUTO
    fp8_grouped: str = AUTO
    adam: str = AUTO
    grad_stats: str = AUTO
    sample: str = AUTO

    def __post_init__(self) -> None:
        for field in fields(self):
            if self.choice(field.name) is not None:
                implementation_named(operator_named(field.name), getattr(self, field.name))

    @classmethod
    def batch_invariant(cls, **choices: str) -> KernelConfig:
        """Products, norms and attention that give a token the same bits in every batch.

        Training and serving then agree bit for bit where their other operators work element by
        element. `choices` are of further operators. What it costs: `mcore-kernels bench --every`.
        """
        ops = ("linear", "rms_norm", "add_rms_norm", "layer_norm", "attention")
        return cls(**{**dict.fromkeys(ops, "invariant"), **choices})

    def choice(self, op: str) -> str | None:
        """The name given for `op`; None for "auto"."""
        name: str = getattr(self, op)
        return None if name == AUTO else name
