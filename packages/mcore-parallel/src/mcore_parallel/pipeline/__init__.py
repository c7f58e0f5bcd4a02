"""Pipeline parallelism: schedules as data, proofs and pictures of them, and one executor."""

# Names are added in _public.py; they are imported when the first of them is asked for.
from typing import TYPE_CHECKING

from mcore_parallel._lazy import public_names

if TYPE_CHECKING:
    from mcore_parallel.pipeline._public import *  # noqa: F403
else:
    __getattr__ = public_names(__name__)
