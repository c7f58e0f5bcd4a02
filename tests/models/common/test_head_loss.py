"""The loss from the head's factors in chunks: that of whole logits, which there never are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_models import GPT, GlobalCounts, ModelConfig, MTPConfig, TokenBatch, build_model
from mcore_models.common.head_loss import loss_of_logits, takes_chunks
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey, init_from_env
from mcore_parallel.data import data_parallel
from mcore_parallel.testing import RankPool

V, S = 331, 24
CONFIG = ModelConfig(
    vocab_size=V, hidden_size=16, num_layers=1, num_heads=2, ffn_size=24, init_std=0.3
)
TERMS: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 1e-2}
CHUNK = 5


def example() -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(V, (2, S), generator=generator)
    mask = torch.rand(2, S, generator=generator).lt(0.7).float()
    return TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1), loss_mask=mask)


def counts_of(batch: TokenBatch) -> GlobalCounts:
    assert batch.loss_mask is not None
    return GlobalCounts(tokens=float(batch.loss_mask.sum()))


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every loss from whole logits."""
    monkeypatch.setattr("mcore_models.gpt.takes_chunks", lambda head: False)


def buckets_of(model: GPT) -> Any:
    """Buffers for the gradients of all parameters, as a training step has them."""
    return data_parallel(
        model, model.specs(), model.mesh, units=model.blocks, methods=("stage_forward",), key=None
    )


def gradients(model: GPT, batches: list[TokenBatch], **options: Any) -> dict[str, Tensor]:
    """The loss, and the gradients that `batches` leave in the buffers."""
    buckets, counts = buckets_of(model), counts_of(batches[0])
    factor = 1.0 if options.get("unit_gradient") else 3.0
    losses = []
    for last, batch in enumerate(batches, 1 - len(batches)):
        auxiliary = model.auxiliary_losses(counts)
        loss = model.loss(batch, counts=counts, auxiliary=auxiliary, **options)
        if last:
            with buckets.no_sync():
                (factor * loss).backward()
        else:
            (factor * loss).backward()
        losses.append(loss.detach())
    buckets.finish()
    found = {name: held.tensor / factor for name, held in buckets.gradients().items()}
    return {"loss": torch.stack(losses), **found}


def equal(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= 1e-5 * other.norm())


@pytest.mark.parametrize("unit_gradient", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": True, "logit_scale": 0.5}],
    ids=["own weight", "tied, scaled"],
)
def test_chunks_are_the_whole(
    changes: dict[str, Any], unit_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smoothing, z-loss and tokens that do not count; micro-batches add up; any factor but 1."""
    batches = [example(), replace(example(), loss_mask=None)]
    found = []
    for chunks in (True, False):
        if not chunks:
            whole(monkeypatch)
        model = build_model(replace(CONFIG, **changes), key=RngKey(1)).train()
        options = {**TERMS, "chunk_tokens": CHUNK, "unit_gradient": unit_gradient}
        found.append(gradients(model, batches, **options))
    assert found[0].keys() == found[1].keys()
    for name, value in found[1].items():
        assert equal(found[0][name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("unit_gradient", [False, True])
def test_in_other_dtypes(
    dtype: torch.dtype, unit_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are of float32 for 16 bits, and of float64 for float64."""
    found = []
    for chunks in (True, False):
        if not chunks:
            whole(monkeypatch)
        model = build_model(CONFIG, key=RngKey(1), dtype=dtype).train()
        options = {"chunk_tokens": CHUNK, "unit_gradient": unit_gradient}
        found.append(gradients(model, [example()], **options))
    error = 2e-2 if dtype == torch.bfloat16 else 1e-6  # the mean is divided in float32
    for name, value in found[1].items():
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        assert (found[0][name] - value).norm() <= error * value.norm(), name


def test_further_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that several losses use, each with a gradient of its own."""
    config = replace(CONFIG, mtp=MTPConfig(num_depths=2, loss_weight=0.7))
    found = []
    for chunks in (True, False):
        if not chunks:
            whole(monkeypatch)
        model = build_model(config, key=RngKey(1)).train()
        found.append(gradients(model, [example()], chunk_tokens=CHUNK, unit_gradient=True))
    for name, value in found[1].items():
        assert equal(found[0][name], value), name


class _Largest(TorchDispatchMode):
    """The most rows of any tensor that has a column for each token of the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            # Not the weight [V, H] from its other side.
            if isinstance(one, Tensor) and one.shape[1:] == (V,) and len(one) != CONFIG.hidden_size:
                self.rows = max(self.rows, len(one))
        return made


@contextmanager
def largest() -> Iterator[_Largest]:
    with _Largest() as found:
        yield found


@pytest.mark.parametrize("further", [0, 1])
def test_logits_are_never_whole(further: int) -> None:
    config = replace(CONFIG, mtp=MTPConfig(num_depths=further) if further else None)
    model, batch = build_model(config).train(), example()
    counts = counts_of(batch)
    auxiliary = model.auxiliary_losses(counts)
    with largest() as found:
        loss = model.loss(batch, counts=counts, auxiliary=auxiliary, chunk_tokens=CHUNK)
        loss.backward()
    assert found.rows == CHUNK
    with largest() as found, torch.no_grad():
        alone = model.eval().loss(batch, counts=counts, chunk_tokens=CHUNK)
    assert found.rows == CHUNK
    assert torch.equal(alone, loss)


def test_validation_multiplies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that ask for gradients get none where no graph is recorded."""
    model, calls = build_model(CONFIG), []
    for name in ("forward", "input_grad", "weight_grad"):
        product = getattr(model.lm_head.linear, name)  # type: ignore[union-attr]

        def watched(*args: Any, product: Any = product, name: str = name, **more: Any) -> Any:
            calls.append(name)
            return product(*args, **more)

        monkeypatch.setattr(model.lm_head.linear, name, watched, raising=False)  # type: ignore[union-attr]
    with torch.no_grad():
        model.loss(example(), counts=counts_of(example()), chunk_tokens=S)
    assert calls == ["forward"] * 2


def test_heads_that_are_more_than_a_product_have_whole_logits() -> None:
    capped = build_model(replace(CONFIG, logit_softcap=2.0))
    batch = example()
    counts = counts_of(batch)
    with largest() as found:
        loss = capped.loss(batch, counts=counts, chunk_tokens=CHUNK)
    assert found.rows == 2 * S
    assert capped.stage_forward(batch).abs().max() <= 2.0
    assert loss.isfinite()
    assert takes_chunks(capped.lm_head)
    assert not takes_chunks(None)


def over_ranks(layout: str) -> tuple[list[str], dict[str, tuple[Tensor, Tensor]]]:
    """Where a layout's gradients differ in chunks and whole, and what this rank has of both."""
    init_from_env(device="cpu")
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    both = []
    for chunk_tokens in (CHUNK, None):
        model = build_model(CONFIG, mesh, key=RngKey(1)).train()
        if chunk_tokens is None:
            model._token_loss = lambda hidden, batch, loss, model=model: loss_of_logits(  # type: ignore[method-assign,misc]
                model._logits(hidden),
                batch,
                loss,
                group=model.mesh.tp,
                kernels=model.kernels,
                vocab_size=V,
            )
        both.append(gradients(model, [example()], chunk_tokens=chunk_tokens, unit_gradient=True))
    mesh.close()
    pairs = {name: (value, both[1][name]) for name, value in both[0].items()}
    wrong = [n for n, (a, b) in pairs.items() if not equal(a, b)]
    return wrong, pairs


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp"])
def test_shards_of_the_vocabulary(ranks: RankPool, layout: str) -> None:
    """331 columns over two ranks: one of them has a column of padding, which gets nothing."""
    for wrong, pairs in ranks.run(over_ranks, 2, layout):
        assert not wrong
        assert pairs["grad/lm_head.weight"][0].abs().max() > 0
