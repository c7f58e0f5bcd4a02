"""What a step takes: model, layout and machine in; seconds, bytes and their reasons out.

Pure arithmetic, without processes and without torch.
"""

# Names are added in _public.py; they are imported when the first of them is asked for.
from typing import TYPE_CHECKING

from mcore_parallel._lazy import public_names

if TYPE_CHECKING:
    from mcore_parallel.cost._public import *  # noqa: F403
else:
    __getattr__ = public_names(__name__)
