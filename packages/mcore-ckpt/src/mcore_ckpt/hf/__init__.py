"""Hugging Face folders: read into any layout, written from any layout, converted."""

from mcore_ckpt.hf.architecture import Architecture, architecture_for, find_architecture
from mcore_ckpt.hf.folder import HFFolder
from mcore_ckpt.hf.load import load_hf
from mcore_ckpt.hf.save import save_hf
from mcore_ckpt.hf.sink import SafetensorsSink
from mcore_ckpt.hf.source import SafetensorsFolder

__all__ = [
    "Architecture",
    "HFFolder",
    "SafetensorsFolder",
    "SafetensorsSink",
    "architecture_for",
    "find_architecture",
    "load_hf",
    "save_hf",
]
