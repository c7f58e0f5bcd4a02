"""Low-rank adapters: made on a model, trained alone, merged into its weights."""

from mcore_models.adapters.config import LoRAConfig
from mcore_models.adapters.lora import adapter_tensors, adapters, add_lora, merge, merged
from mcore_models.adapters.peft import lora_config, peft_config, peft_mapping

__all__ = [
    "LoRAConfig",
    "adapter_tensors",
    "adapters",
    "add_lora",
    "lora_config",
    "merge",
    "merged",
    "peft_config",
    "peft_mapping",
]
