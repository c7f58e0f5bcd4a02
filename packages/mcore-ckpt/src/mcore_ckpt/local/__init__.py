"""Fast checkpoints in a directory of each machine, with copies on a neighbour.

They are for going on after a crash, or after the loss of a machine, from a newer step than that of
the last checkpoint on shared storage. Each rank writes its tensors as they are, so nothing is
exchanged but the copies; they are loaded under any layout all the same.
"""

from mcore_ckpt.local.finding import FoundLocal, find_local
from mcore_ckpt.local.loading import load_local
from mcore_ckpt.local.saving import save_local

__all__ = ["FoundLocal", "find_local", "load_local", "save_local"]
