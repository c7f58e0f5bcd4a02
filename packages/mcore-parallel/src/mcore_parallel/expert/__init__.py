"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

Expert parameters live on the expert view of the mesh (etp × ep × edp): `ep` deals the experts
out, `etp` cuts each of them, and over `edp` they are copies whose gradients are summed. That sum is
complete when every rank of a pipeline stage routes tokens of its own: ranks of `dp` and `cp` do,
and ranks of `tp` do under sequence parallelism; without it `take_share` deals their tokens out.
"""

# Names are added in _public.py; they are imported when the first of them is asked for.
from typing import TYPE_CHECKING

from mcore_parallel._lazy import public_names

if TYPE_CHECKING:
    from mcore_parallel.expert._public import *  # noqa: F403
else:
    __getattr__ = public_names(__name__)
