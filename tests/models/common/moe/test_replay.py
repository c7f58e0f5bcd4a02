"""Choices taken down and used again: around backward passes, and beside what fills up shares."""

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

from mcore_models import TokenContext
from mcore_models.common.moe import RoutedTokens, recorded, replayed
from mcore_parallel import Group
from mcore_parallel.recompute import recompute

sys.path.append(str(Path(__file__).parent))
from moe_layers import CONFIG, E, H, batch_of, changed, make, random


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_pass_in_the_block_changes_no_record(again: bool) -> None:
    """A layer that is recomputed routes again in it, as it did before and as it is told to."""
    old, new = make(CONFIG), make(CONFIG)
    with torch.no_grad():
        new.router.weight += 0.5 * random(E, H, seed=7)
    context = TokenContext(batch=batch_of(torch.ones(12), [0, 12]))
    rows, results = torch.arange(12), []
    chosen = old.router(random(12, H)).experts
    for layer in (old, new):
        with ExitStack() as stack:
            if layer is old:
                record = stack.enter_context(recorded(old))
            else:
                stack.enter_context(replayed(new, record))
            hidden = random(12, H).requires_grad_()
            call = partial(layer, context=context)
            out = recompute(call, hidden) if again else call(hidden)
            out.square().sum().backward()
            results.append(hidden.grad)
        assert torch.equal(record.find(0, rows), chosen)
    assert sum(map(len, record._parts[0])) == 12  # each is kept once
    with replayed(new, record):
        hidden = random(12, H).requires_grad_()
        new(hidden, context).square().sum().backward()
    torch.testing.assert_close(results[1], hidden.grad)


@pytest.mark.parametrize("outer", ["recorded", "replayed"])
def test_what_is_replayed_is_recorded(outer: str) -> None:
    """Whichever block is within the other; the innermost record of several is the one followed."""
    old, new = make(CONFIG), make(CONFIG)
    with torch.no_grad():
        new.router.weight += 0.5 * random(E, H, seed=7)
    context, rows = TokenContext(batch=batch_of(torch.ones(12), [0, 12])), torch.arange(12)
    with recorded(old) as record:
        old(random(12, H), context)
    with recorded(new) as own:
        new(random(12, H), context)
    assert not torch.equal(own.find(0, rows), record.find(0, rows))
    with ExitStack() as stack:
        if outer == "recorded":
            again = stack.enter_context(recorded(new))
        stack.enter_context(replayed(new, own))
        stack.enter_context(replayed(new, record))
        if outer == "replayed":
            again = stack.enter_context(recorded(new))
        new(random(12, H), context)
    assert torch.equal(again.find(0, rows), record.find(0, rows))
    assert new.router.replay is None


def test_what_fills_up_a_share_is_no_token_of_the_record() -> None:
    """It has number 0, which is that of a token of another rank, or of none at all."""
    layer, hidden = make(CONFIG), random(7, H)
    whole = batch_of(torch.ones(7), [0, 3, 7], rows=torch.arange(7) + 40)
    with recorded(layer) as record:
        layer(hidden, TokenContext(batch=whole))
    chosen = layer.router(hidden).experts
    with torch.no_grad():
        layer.router.weight += 0.5 * random(E, H, seed=7)
    seen = filled = 0
    for rank in range(2):
        share = whole.share(rank, 2)
        assert share.rows is not None
        assert share.real is not None
        mine = random(len(share.rows), H, seed=rank)
        own = layer.router(mine).experts
        parts = RoutedTokens(batch=share, mine=slice(None), tp=Group.single(), cp=Group.single())
        with recorded(layer) as theirs:
            layer(mine, TokenContext(batch=share))
        with replayed(layer, record):
            found = layer.router(mine, parts).experts
        real = share.real
        assert torch.equal(found[real], chosen[share.rows[real] - 40])
        assert torch.equal(found[~real], own[~real])
        assert torch.equal(theirs.find(0, share.rows[real]), own[real])
        with pytest.raises(ValueError, match="no choice of 1 of 1 tokens in layer 0"):
            theirs.find(0, torch.zeros(1, dtype=torch.int64))
        wide = make(changed(top_k=3))
        with replayed(wide, record), pytest.raises(ValueError, match="choices of 2 experts"):
            wide.router(mine, parts)
        seen, filled = seen + int(real.sum()), filled + int((~real).sum())
    assert (seen, filled) == (7, 1)
