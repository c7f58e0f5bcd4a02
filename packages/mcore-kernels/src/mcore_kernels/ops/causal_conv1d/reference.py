"""The causal convolution as a sum of shifted products.

Shapes: T tokens, N documents, C channels, W taps; M rows in one piece (R pieces), each document's
behind the W-1 rows of its history.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype, rounded


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    uniform: tuple[int, int] | None = None,
    initial_states: Tensor | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.CausalConv1dOp`; ValueError for shapes that do not fit."""
    count, past = cu_seqlens.shape[0] - 1, weight.shape[1] - 1
    check(x, weight, bias, count, uniform, initial_states)
    if initial_states is None:
        history = x.new_zeros(count, past, x.shape[1])
    else:
        history = initial_states.to(x.dtype)
    if uniform is not None:
        rows = torch.cat((history, x.reshape(*uniform, x.shape[1])), 1)  # [N, W-1+S, C]
        y = _convolved(rows, weight, bias, silu).flatten(0, 1)
        return rounded(y, x.dtype), rows[:, uniform[1] :]
    bounds = cu_seqlens.long()
    rows = _behind_history(x, history, bounds).unsqueeze(0)
    y = _convolved(rows, weight, bias, silu)[0]
    token = torch.arange(x.shape[0], device=x.device)
    document = torch.searchsorted(bounds[1:], token, right=True)
    y = y.index_select(0, token + document * past)
    y = torch.where((document < count).unsqueeze(1), y, 0.0)
    last = bounds[1:, None] + torch.arange(count * past, device=x.device).view(count, past)
    return rounded(y, x.dtype), rows[0].index_select(0, last.flatten()).view_as(history)


def _convolved(rows: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Every window of the W neighbouring rows of a piece: [R, M, C] → [R, M-W+1, C], wide."""
    wide = accumulation_dtype(rows.dtype)
    width = weight.shape[1]
    taps = weight.to(wide).unbind(1)
    windows = rows.shape[1] - width + 1
    y = rows[:, :windows] * taps[0]
    for k in range(1, width):
        y = torch.addcmul(y, rows[:, k : k + windows].to(wide), taps[k])
    if bias is not None:
        y = y + bias.to(wide)
    return F.silu(y) if silu else y


def _behind_history(x: Tensor, history: Tensor, bounds: Tensor) -> Tensor:
    """The rows of each document behind its history, then W-1 rows of zeros: [T + (N+1)(W-1), C].

    Rows of no document are zeros too, so that no window ever reads what they hold.
    """
    count, past = history.shape[:2]
    total = x.shape[0] + (count + 1) * past
    place = torch.arange(total, device=x.device)
    number = torch.arange(count + 1, device=x.device)
    document = torch.searchsorted(bounds[1:] + number[1:] * past, place, right=True)
    offset = place - (bounds + number * past)[document]
    own = torch.where(
        offset < past,
        x.shape[0] + document * past + offset,  # its history
        place - (document + 1) * past,
    )
    nothing = x.shape[0] + count * past
    source = torch.where(document < count, own, nothing)
    return torch.cat((x, history.flatten(0, 1), x.new_zeros(1, x.shape[1]))).index_select(0, source)


def limits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_states: Tensor | None = None,
    **_: object,
) -> str | None:
    """What the Triton kernels take."""
    return None if initial_states is None else "takes no initial states"


def check(  # noqa: PLR0917 -- the arguments of the operator, as they came
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    count: int,
    uniform: tuple[int, int] | None,
    initial_states: Tensor | None,
) -> None:
    """Refuse shapes that do not fit together, with a ValueError."""
    channels, width = x.shape[1], weight.shape[1]
    if weight.shape[0] != channels or width < 1:
        raise ValueError(
            f"causal_conv1d: x has {channels} channels, so the weight is [{channels}, width] with "
            f"a width of at least 1; got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"causal_conv1d: the bias is [{channels}], got {list(bias.shape)}")
    if uniform is not None and (uniform[0] != count or uniform[0] * uniform[1] != x.shape[0]):
        raise ValueError(
            f"causal_conv1d: uniform={uniform} means {uniform[0] * uniform[1]} rows of "
            f"{uniform[0]} documents, got {x.shape[0]} rows of {count}"
        )
    states = (count, width - 1, channels)
    if initial_states is not None and initial_states.shape != states:
        raise ValueError(
            f"causal_conv1d: {count} documents have initial states {list(states)}, got "
            f"{list(initial_states.shape)}"
        )
