"""Numbers of 8 and 4 bits: formats, scales, recipes, and which module uses which."""

from mcore_kernels.quant.formats import E2M1, E4M3, E5M2, Format
from mcore_kernels.quant.microscaling import (
    MXFP8,
    NVFP4,
    BlockScaled,
    mxfp8_dequantize,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from mcore_kernels.quant.recipe import Fp8Recipe, MicroscalingRecipe
from mcore_kernels.quant.rules import PrecisionRules
from mcore_kernels.quant.scaling import DelayedScale, dequantize, scale_of

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "MXFP8",
    "NVFP4",
    "BlockScaled",
    "DelayedScale",
    "Format",
    "Fp8Recipe",
    "MicroscalingRecipe",
    "PrecisionRules",
    "dequantize",
    "mxfp8_dequantize",
    "mxfp8_quantize",
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "scale_of",
]
