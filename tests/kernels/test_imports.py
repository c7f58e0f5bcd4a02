"""What importing the package loads, and what it does not."""

import subprocess
import sys

CODE = """
import sys
import mcore_kernels, mcore_kernels.testing, mcore_kernels.cli
import torch
from mcore_kernels import KernelConfig, Kernels, Target, explain
Kernels()
explain(Target(device_type="cuda", arch=(9, 0), dtype=torch.bfloat16))
x = torch.randn(2, 8, requires_grad=True)
Kernels().rms_norm(x, torch.ones(8), 1e-5).sum().backward()
roots = {name.partition(".")[0] for name in sys.modules}
print(sorted(roots & {"triton", "transformer_engine", "flash_attn", "mcore_parallel", "sympy"}))
print("torch._dynamo" in sys.modules)
"""


def test_nothing_optional_and_no_sibling_is_imported() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["[]", "False"]
