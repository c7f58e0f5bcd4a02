"""Where Triton kernels run: in the interpreter, or on a GPU.

The interpreter is switched on before triton is imported or not at all, so these tests run in a
process of their own (see `test_interpreter.py` above this folder).
"""

import os

import pytest
import torch

from mcore_kernels import Target

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "interpreter":
        if not INTERPRETED:
            pytest.skip("runs in the process that tests/kernels/test_interpreter.py starts")
        return Target(interpret=True)
    if INTERPRETED or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and no interpreter")
    return Target.of("cuda")
