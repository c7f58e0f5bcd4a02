"""One open checkpoint format that always reshards: zarr v3, a JSON manifest, atomic commits."""

from mcore_ckpt.asynchronous import AsyncSaver, PendingSave
from mcore_ckpt.checkpoint import Checkpoint, read_state
from mcore_ckpt.checkpoint import open_checkpoint as open
from mcore_ckpt.commit import latest, list_checkpoints
from mcore_ckpt.engine import ChunkData, Engine, Region, Writing
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.finding import Found, find
from mcore_ckpt.loading import load
from mcore_ckpt.manifest import FileInfo, Manifest, TensorInfo
from mcore_ckpt.pruning import Pruned, prune
from mcore_ckpt.saving import save
from mcore_ckpt.storage import LocalStorage, Storage
from mcore_ckpt.targets import LoadReport
from mcore_ckpt.verifying import Problem, Verification, verify

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "CheckpointError",
    "ChunkData",
    "Engine",
    "FileInfo",
    "Found",
    "LoadReport",
    "LocalStorage",
    "Manifest",
    "PendingSave",
    "Problem",
    "Pruned",
    "Region",
    "Storage",
    "TensorInfo",
    "Verification",
    "Writing",
    "find",
    "latest",
    "list_checkpoints",
    "load",
    "open",
    "prune",
    "read_state",
    "save",
    "verify",
]
