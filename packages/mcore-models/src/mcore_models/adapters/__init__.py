"""Low-rank adapters: made on a model, trained alone, merged into its weights."""

from mcore_models.adapters.config import LoRAConfig
from mcore_models.adapters.lora import adapters, add_lora, merge, merged

__all__ = ["LoRAConfig", "adapters", "add_lora", "merge", "merged"]
