"""The causal convolution beyond conformance: documents, continuation, gradients, errors."""

import pytest
import torch
from torch import Tensor

from mcore_kernels import Target, resolve

conv = resolve("causal_conv1d", target=Target(), require="reference")
CHANNELS, WIDTH = 5, 4


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def parameters(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(CHANNELS, WIDTH, generator=generator, dtype=dtype)
    return weight, torch.randn(CHANNELS, generator=generator, dtype=dtype)


def test_it_is_torchs_convolution_over_a_padded_past() -> None:
    x, (weight, bias) = torch.randn(9, CHANNELS), parameters()
    y, _ = conv(x, weight, bias, cu_seqlens=ends(9), uniform=(1, 9))
    expected = torch.nn.functional.conv1d(
        x.t()[None], weight[:, None], bias, padding=WIDTH - 1, groups=CHANNELS
    )
    torch.testing.assert_close(y, expected[0, :, :9].t())


@pytest.mark.parametrize("silu", [False, True])
def test_documents_do_not_see_each_other(silu: bool) -> None:
    """Changing one document changes no bit of the next, which is as if it were alone (U41)."""
    weight, bias = parameters()
    x = torch.randn(11, CHANNELS)
    y, states = conv(x, weight, bias, cu_seqlens=ends(6, 5), silu=silu)
    changed = x.clone()
    changed[:6] = torch.randn(6, CHANNELS)
    other, other_states = conv(changed, weight, bias, cu_seqlens=ends(6, 5), silu=silu)
    assert torch.equal(other[6:], y[6:])
    assert torch.equal(other_states[1], states[1])
    assert not torch.equal(other[:6], y[:6])
    alone, state = conv(x[6:], weight, bias, cu_seqlens=ends(5), uniform=(1, 5), silu=silu)
    torch.testing.assert_close(y[6:], alone)
    assert torch.equal(states[1:], state)


def test_a_document_in_pieces_is_the_whole() -> None:
    """Two documents continued twice, by different numbers of tokens and by none."""
    weight, bias = parameters()
    x = torch.randn(2, 7, CHANNELS)
    whole, last = conv(x.flatten(0, 1), weight, bias, cu_seqlens=ends(7, 7))
    pieces: list[list[Tensor]] = [[], []]
    states, at = None, [0, 0]
    for lengths in ((2, 5), (1, 0), (4, 2)):
        new = torch.cat([x[n, at[n] : at[n] + lengths[n]] for n in range(2)])
        y, states = conv(new, weight, bias, cu_seqlens=ends(*lengths), initial_states=states)
        for n, rows in enumerate(torch.split(y, lengths)):
            pieces[n].append(rows)
            at[n] += lengths[n]
    torch.testing.assert_close(torch.cat([*pieces[0], *pieces[1]]), whole)
    assert states is not None
    assert torch.equal(states, last)


def test_gradients_in_double_precision() -> None:
    weight, bias = (p.requires_grad_() for p in parameters(torch.float64))
    x = torch.randn(7, CHANNELS, dtype=torch.float64, requires_grad=True)
    states = torch.randn(3, WIDTH - 1, CHANNELS, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, weight: Tensor, bias: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return conv(x, weight, bias, cu_seqlens=ends(2, 0, 4), initial_states=states, silu=True)

    assert torch.autograd.gradcheck(run, (x, weight, bias, states))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(4, 4)}, r"x has 5 channels, so the weight is \[5, width\]"),
        ({"bias": torch.ones(4)}, r"the bias is \[5\], got \[4\]"),
        ({"uniform": (2, 4)}, r"uniform=\(2, 4\) means 8 rows of 2 documents, got 7 rows of 2"),
        ({"initial_states": torch.ones(2, 4, 5)}, r"initial states \[2, 3, 5\], got \[2, 4, 5\]"),
    ],
)
def test_shapes_that_do_not_fit(change: dict[str, object], message: str) -> None:
    weight, bias = parameters()
    arguments = {"weight": weight, "bias": bias, "cu_seqlens": ends(3, 4), **change}
    with pytest.raises(ValueError, match=f"causal_conv1d: .*{message}"):
        conv(torch.zeros(7, CHANNELS), **arguments)
