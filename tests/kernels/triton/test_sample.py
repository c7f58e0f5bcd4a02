"""Sampling in Triton draws what the reference draws, token for token."""

import pytest
import torch

from mcore_kernels import Target, resolve, uniforms

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@pytest.mark.parametrize("rounded", [False, True])
def test_the_tokens_are_the_references(target: Target, rounded: bool) -> None:
    """Each kind of cut by itself and with others, side by side in a batch; with many equals too."""
    size, rows = (40, 9) if target.interpret else (151_936, 252)
    row = torch.arange(rows)
    kind = row % 9
    generator = torch.Generator().manual_seed(int(rounded))
    logits = 3 * torch.randn(rows, size, generator=generator)
    logits[kind == 7] /= 100  # nearly all alike: a share is nearly everybody
    logits = logits.round() if rounded else logits
    draws = uniforms(row // 9 + 17, row)
    draws[1], draws[2] = 0.0, 1 - 2.0**-53
    given = {
        "temperature": torch.where(kind == 8, 0.0, 0.5 + 0.1 * (row % 7)),
        "top_k": torch.where((kind == 1) | (kind == 4) | (kind == 5), size // 5 + row % 3, 0),
        "top_p": torch.where((kind == 2) | (kind >= 4), 0.9, 1.0).double(),
        "min_p": torch.where((kind == 3) | (kind >= 5), 0.02, 0.0),
    }
    moved = {name: value.to(target.device_type) for name, value in given.items()}
    wide = torch.full((rows, size + 3), torch.nan)  # rows of a wider matrix
    wide[:, :size] = logits
    found, wanted = (
        resolve("sample", target=target, require=name)(
            wide.to(target.device_type)[:, :size], draws.to(target.device_type), **moved
        )
        for name in ("triton", "reference")
    )
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=1e-6)


def test_the_draw_is_an_operator_of_torch(target: Target) -> None:
    """Schema and fake results hold (torch's own checker)."""
    rows = torch.ones(2, device=target.device_type)
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 3.0]], device=target.device_type)
    resolve("sample", target=target, require="triton")(logits, rows / 2, temperature=rows)
    arguments = (logits, rows.double() / 2, rows, rows.long(), None, None)
    operator = torch.ops.mcore_kernels.sample.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
