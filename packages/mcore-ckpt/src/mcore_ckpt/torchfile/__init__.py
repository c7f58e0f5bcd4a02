"""Files that `torch.save` writes, opened without running anything that is in them."""

from mcore_ckpt.torchfile.archive import Mapped, load_archive, load_file
from mcore_ckpt.torchfile.unpickling import Inert, fields, load_pickle

__all__ = ["Inert", "Mapped", "fields", "load_archive", "load_file", "load_pickle"]
