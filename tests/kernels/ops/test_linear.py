"""The first gradient of a step, which is written where later ones are added."""

import pytest
import torch

from mcore_kernels import Target, resolve


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["reference", "invariant", "mixed"])
def test_a_first_gradient_is_what_would_be_added_to_zeros(
    name: str, dtype: torch.dtype, device: str
) -> None:
    """Whatever is there, NaN too; bit for bit."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    target = Target.of(device, dtype=dtype)
    try:
        op = resolve("linear", target=target, require=name)
    except ValueError:
        assert name == "mixed"
        assert device == "cpu" or dtype == torch.float32
        return
    for tokens, inputs, outputs in ((32, 48, 64), (0, 8, 16), (7, 8, 16)):
        dy = torch.randn(tokens, outputs, device=device).to(dtype)
        x = torch.randn(tokens, inputs, device=device).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        written = torch.full((outputs, inputs), torch.nan, device=device, dtype=wide)
        op.write_weight_grad(dy, x, written)
        added = op.weight_grad(dy, x, out=torch.zeros_like(written))
        assert torch.equal(written, added)
