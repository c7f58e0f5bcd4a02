"""One conformance suite for every implementation of every operator, yours included.

from mcore_kernels.testing import assert_matches_reference
assert_matches_reference("rms_norm", "my_package.norms:FAST_NORM")
"""

from mcore_kernels.testing.case import Case
from mcore_kernels.testing.cases import cases
from mcore_kernels.testing.conformance import assert_matches_reference, runnable

__all__ = ["Case", "assert_matches_reference", "cases", "runnable"]
