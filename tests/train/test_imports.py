"""What building and training a model loads, and what it does not."""

import subprocess
import sys

CODE = """
import sys
from mcore_parallel import ParallelMesh
from mcore_train.parity import comparable, record
from mcore_train.parity.families import FAMILIES, family_config
for family in FAMILIES:
    record(comparable(family_config(family)), ParallelMesh.single(), 1)
print(sorted({"sympy", "torch._dynamo", "torch._inductor", "triton"} & set(sys.modules)))
"""


def test_the_compiler_is_not_imported_to_train() -> None:
    """It takes a second of every process; a copy of the shape of a meta tensor imports half."""
    command = [sys.executable, "-W", "error", "-c", CODE]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
