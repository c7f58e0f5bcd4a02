"""Embedding, head and loss over a cut and padded vocabulary against dense torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel import Box, Group, Init, RngKey, TensorLayout, initialise, param_specs
from mcore_parallel.layout import check_tiling
from mcore_parallel.layout.transfer import gather_layouts
from mcore_parallel.spec import fill_
from mcore_parallel.tensor import (
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_logits,
    padded_vocab_size,
    vocab_parallel_cross_entropy,
)
from mcore_parallel.testing import RankPool

T, H = 8, 5
INIT = Init(kind="normal", std=0.4)
KEY = RngKey(5)


@dataclass(frozen=True, kw_only=True)
class Case:
    vocab: int
    tied: bool = False
    sequence_parallel: bool = False
    multiple_of: int = 1
    smoothing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    loss: Tensor
    logits: Tensor
    local_rows: int
    padding_grads: list[Tensor]
    grads: list[tuple[str, Box, Tensor]]


class Model(nn.Module):
    """Embedding, a bent middle that lets gradients through, head."""

    def __init__(self, case: Case, group: Group) -> None:
        super().__init__()
        self.tied = case.tied
        self.embedding = VocabParallelEmbedding(
            case.vocab,
            H,
            group=group,
            sequence_parallel=case.sequence_parallel,
            multiple_of=case.multiple_of,
            init=INIT,
            dtype=torch.float64,
        )
        self.lm_head = VocabParallelHead(
            H,
            case.vocab,
            group=group,
            bias=True,
            tied=case.tied,
            sequence_parallel=case.sequence_parallel,
            multiple_of=case.multiple_of,
            init=INIT,
            dtype=torch.float64,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).tanh()
        logits: Tensor = self.lm_head(hidden, self.embedding.weight if self.tied else None)
        return logits


def tokens_and_labels(vocab: int) -> tuple[Tensor, Tensor]:
    """All tokens of the vocabulary take part, the last one too."""
    tokens = torch.arange(T * 3) * 5 % vocab
    return tokens[-T:], tokens[:T].flip(0) * 3 % vocab


def spread(loss: Tensor) -> Tensor:
    """A different weight for every token, so that a permuted loss shows."""
    return (loss * torch.linspace(0.5, 2.0, T, dtype=loss.dtype)).sum()


# Far below 0, where a padding column with its logit of 0 would take all of the probability.
BIAS = Init(kind="uniform", low=-41.0, high=-40.0)


def run_model(case: Case) -> Seen:
    group = Group.world()
    model = Model(case, group)
    specs = param_specs(model, tp=group, sequence_parallel=case.sequence_parallel)
    specs["lm_head.bias"] = replace(specs["lm_head.bias"], init=BIAS)
    initialise(dict(model.named_parameters()), specs, KEY)
    layouts = gather_layouts({name: spec.layout for name, spec in specs.items()}, group)
    check_tiling(layout for by_name in layouts.values() for layout in by_name.values())
    tokens, labels = tokens_and_labels(case.vocab)
    logits = model(tokens)
    loss = vocab_parallel_cross_entropy(
        logits, labels, group, vocab_size=case.vocab, label_smoothing=case.smoothing
    )
    spread(loss).backward()
    padding, grads = [], []
    real = model.embedding.shard.real
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert not specs[name].grad_sync
        padding.append(param.grad[real:].cpu().clone())
        for fragment, view in specs[name].layout.views(param.grad):
            grads.append((fragment.name, fragment.box, view.cpu().clone()))
    return Seen(
        loss=loss.detach().cpu(),
        logits=gather_logits(logits, group, vocab_size=case.vocab).detach().cpu(),
        local_rows=logits.shape[1],
        padding_grads=padding,
        grads=grads,
    )


def run_model_on_gpu(case: Case) -> Seen:
    with torch.device("cuda"):
        return run_model(case)


def whole(name: str, init: Init, *shape: int) -> Tensor:
    tensor = torch.empty(shape, dtype=torch.float64)
    fill_(tensor, TensorLayout.whole(name, shape), init, KEY)
    return tensor.requires_grad_()


def dense_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Torch's smoothing spreads its α over all K classes, ours over the other K - 1."""
    k = logits.shape[1]
    return F.cross_entropy(
        logits, labels, reduction="none", label_smoothing=smoothing * k / max(k - 1, 1)
    )


CASES = {
    "even": Case(vocab=8),
    "7": Case(vocab=7),  # U24
    "7-sequence": Case(vocab=7, sequence_parallel=True),
    "7-tied": Case(vocab=7, tied=True),
    "7-tied-sequence-smooth": Case(vocab=7, tied=True, sequence_parallel=True, smoothing=0.1),
    "7-multiple": Case(vocab=7, multiple_of=4, smoothing=0.2),
    "a-rank-without-tokens": Case(vocab=5, tied=True, multiple_of=2, smoothing=0.3),
    "one-token": Case(vocab=1),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_loss_and_gradients_equal_dense_and_padding_gets_none(
    ranks: RankPool, case: Case, size: int
) -> None:
    """U24: padding changes neither loss nor gradients, and can never be sampled."""
    seen = ranks.run(run_model, size, case)
    table = whole("embedding.weight", INIT, case.vocab, H)
    head = table if case.tied else whole("lm_head.weight", INIT, case.vocab, H)
    bias = whole("lm_head.bias", BIAS, case.vocab)
    tokens, labels = tokens_and_labels(case.vocab)
    logits = F.linear(F.embedding(tokens, table).tanh(), head, bias)
    loss = dense_loss(logits, labels, case.smoothing)
    spread(loss).backward()
    params = {"embedding.weight": table, "lm_head.weight": head, "lm_head.bias": bias}
    found: set[str] = set()
    for one in seen:
        assert one.local_rows * size == padded_vocab_size(case.vocab, size, case.multiple_of)
        torch.testing.assert_close(one.loss, loss.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one.logits, logits.detach(), rtol=1e-12, atol=1e-12)
        assert all(not grad.any() for grad in one.padding_grads)
        for name, box, grad in one.grads:
            expected = params[name].grad
            assert expected is not None
            torch.testing.assert_close(grad, expected[box.slices], rtol=1e-11, atol=1e-12)
            found.add(name)
    assert found == set(params) - ({"lm_head.weight"} if case.tied else set())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["7-multiple", "7-tied-sequence-smooth"])
def test_gpus_equal_the_cpu(ranks: RankPool, name: str) -> None:
    size = next(n for n in (4, 2, 1) if n <= torch.cuda.device_count())
    expected = ranks.run(run_model, size, CASES[name])
    seen = ranks.run(run_model_on_gpu, size, CASES[name], device="cuda")
    for a, b in zip(seen, expected, strict=True):
        torch.testing.assert_close(a.loss, b.loss)
        torch.testing.assert_close(a.logits, b.logits)
        for (one, _, grad), (other, _, expected_grad) in zip(a.grads, b.grads, strict=True):
            assert one == other
            torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize(
    ("vocab", "tp", "multiple_of", "padded"),
    [(7, 1, 1, 7), (7, 2, 1, 8), (7, 4, 1, 8), (8, 4, 1, 8), (50257, 8, 128, 51200), (1, 4, 1, 4)],
)
def test_padded_size(vocab: int, tp: int, multiple_of: int, padded: int) -> None:
    assert padded_vocab_size(vocab, tp, multiple_of) == padded


def embed_tokens(tokens: list[int]) -> None:
    group = Group.world()
    layer = VocabParallelEmbedding(7, H, group=group, sequence_parallel=True)
    layer(torch.tensor(tokens))


@pytest.mark.parametrize("token", [-1, 7])
@pytest.mark.parametrize("size", [1, 2])
def test_tokens_outside_the_vocabulary_are_refused(ranks: RankPool, token: int, size: int) -> None:
    """The row of token 7 of 7 exists as padding, and must not be read as a token."""
    with pytest.raises(ValueError, match=rf"token {token} is outside the vocabulary of 7 \(0 to 6"):
        ranks.run(embed_tokens, size, [0, token])


def test_tokens_that_cannot_be_cut_are_refused(ranks: RankPool) -> None:
    """U02, at the layer."""
    with pytest.raises(ValueError, match=r"cannot cut 10 tokens over tp=4; .* number is 8"):
        ranks.run(embed_tokens, 4, [0] * 10)


def test_tied_and_untied_heads_refuse_each_others_call() -> None:
    x = torch.zeros(1, H)
    with pytest.raises(ValueError, match="is tied: pass a weight only when tied"):
        VocabParallelHead(H, 7, tied=True)(x)
    with pytest.raises(ValueError, match="has its own weight: pass a weight only when tied"):
        VocabParallelHead(H, 7)(x, torch.zeros(7, H))
    assert VocabParallelHead(H, 7, tied=True).param_specs("lm_head") == {}


def gathered(sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    group = Group.world()
    head = VocabParallelHead(
        H, 7, group=group, gather_output=True, sequence_parallel=sequence_parallel
    )
    specs = param_specs(head, tp=group, sequence_parallel=sequence_parallel, prefix="lm_head")
    initialise(dict(head.named_parameters()), specs, KEY)
    x = torch.linspace(-1, 1, T * H).view(T, H)
    x = (x.chunk(group.size)[group.rank] if sequence_parallel else x).clone().requires_grad_()
    logits = head(x)
    logits.square().sum().backward()
    assert x.grad is not None
    assert head.weight is not None
    assert head.weight.grad is not None
    return logits.detach(), x.grad, head.weight.grad


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gathered_logits_have_real_columns_only(ranks: RankPool, sequence_parallel: bool) -> None:
    """U24: what is sampled from has no padding column."""
    ((dense, dx, dw),) = ranks.run(gathered, 1, sequence_parallel)
    seen = ranks.run(gathered, 4, sequence_parallel)
    for rank, (logits, grad, _) in enumerate(seen):
        assert logits.shape == (T, 7)
        torch.testing.assert_close(logits, dense)
        torch.testing.assert_close(grad, dx.chunk(4)[rank] if sequence_parallel else dx)
    table = torch.cat([grad for _, _, grad in seen])
    torch.testing.assert_close(table[:7], dw)
    assert not table[7:].any()


def _gradient_in_place() -> tuple[Tensor, Tensor, bool]:
    """Gradients of a cut table by autograd, and added row by row to a buffer that holds 1."""
    tokens = torch.tensor([3, 0, 6, 3, 3, 1, 6, 2])
    scale = torch.arange(1.0, T * H + 1).view(T, H)
    found = []
    for accumulate in (False, True):
        table = VocabParallelEmbedding(
            7, H, group=Group.world(), accumulate=accumulate, dtype=torch.float32
        )
        weight = table.weight
        if accumulate:
            weight.main_grad = torch.ones_like(weight)
            weight.grad_added_to_main = False
        for _ in range(2):  # a table may be looked into more than once before its hooks run
            (table(tokens) * scale).sum().backward()
        found.append(weight.main_grad if accumulate else weight.grad)
    return found[0], found[1], weight.grad_added_to_main


@pytest.mark.parametrize("world", [1, 2])
def test_rows_are_added_to_the_buffer_of_the_table(world: int, ranks: RankPool) -> None:
    for plain, added, said in ranks.run(_gradient_in_place, world):
        assert said
        torch.testing.assert_close(added, plain + 1, rtol=1e-6, atol=0)


def test_rows_are_added_in_the_same_order_each_time() -> None:
    """Bit by bit what autograd finds, also with several threads and few tokens that differ."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(7, (4096,), generator=generator)
    dy = torch.randn(4096, 64, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        plain = VocabParallelEmbedding(7, 64)
        plain(tokens).backward(dy)
        for _ in range(4):
            table = VocabParallelEmbedding(7, 64, accumulate=True)
            table.weight.main_grad = torch.zeros_like(table.weight)
            table(tokens).backward(dy)
            assert torch.equal(table.weight.main_grad, plain.weight.grad)
    finally:
        torch.set_num_threads(threads)
