"""Where an operator is going to run: known before a tensor is, as models are built on meta."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine and the numbers that a choice of implementations is made for.

    Attributes:
        device_type: what `torch.device.type` will be ("cpu", "cuda", …).
        arch: compute capability of a CUDA device, such as `(9, 0)`; None when unknown or not CUDA.
        dtype: the dtype that activations will have.
        head_dim: size of an attention head; None when the model has none (or it does not matter).
        interpret: run Triton kernels in Triton's interpreter, on CPU and slowly. For tests: the
            interpreter has to be switched on (`TRITON_INTERPRET=1`) before triton is imported.
    """

    device_type: str = "cpu"
    arch: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float32
    head_dim: int | None = None
    interpret: bool = False

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise ValueError(
                f"target dtype must be floating-point, such as torch.bfloat16; got {self.dtype}"
            )
        if self.head_dim is not None and self.head_dim < 1:
            raise ValueError(f"target head_dim must be at least 1, got {self.head_dim}")

    @staticmethod
    def of(
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.float32,
        head_dim: int | None = None,
    ) -> Target:
        """The target for a device of this machine; reads the compute capability of a CUDA device.

        Raises:
            ValueError: the device is a CUDA device and this machine has none.
        """
        device = torch.device(device)
        arch = None
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise ValueError(f"no CUDA device here for the target {str(device)!r}")
            arch = torch.cuda.get_device_capability(device)
        return Target(device_type=device.type, arch=arch, dtype=dtype, head_dim=head_dim)

    def describe(self) -> str:
        """One short line: `cuda sm_90 bfloat16 head_dim=128`."""
        words = [self.device_type]
        if self.arch is not None:
            words.append(f"sm_{self.arch[0]}{self.arch[1]}")
        words.append(str(self.dtype).removeprefix("torch."))
        if self.head_dim is not None:
            words.append(f"head_dim={self.head_dim}")
        if self.interpret:
            words.append("interpreted")
        return " ".join(words)
