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

from mcore_kernels import SoftCap
from mcore_kernels.ops.cross_entropy.head import LOGITS_BYTES
from mcore_kernels.ops.linear.fp8 import Fp8Linear
from mcore_kernels.quant import Fp8Recipe
from mcore_models import (
    GPT,
    AttentionConfig,
    BertConfig,
    GlobalCounts,
    ModelConfig,
    MTPConfig,
    TokenBatch,
    build_model,
)
from mcore_models.common.head_loss import TokenLoss, of_logits, takes_chunks
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey, init_from_env
from mcore_parallel.cost import ModelShape, Planner, Workload, machine, shape
from mcore_parallel.cost.layer import LOGITS_BYTES as ESTIMATED_BYTES
from mcore_parallel.data import data_parallel
from mcore_parallel.testing import RankPool

V, S = 331, 24
CONFIG = ModelConfig(
    vocab_size=V, hidden_size=16, num_layers=1, num_heads=2, ffn_size=24, init_std=0.3
)
TERMS: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 1e-2}
CHUNK = 5
LIKE_GEMMA: dict[str, Any] = {
    "tied_embeddings": True,
    "logit_softcap": 1.5,
    "embedding_scale": 4.0,
    "norm_place": "both",
    "zero_centered_norm": True,
    "activation": "geglu_tanh",
    "attention": AttentionConfig(softcap=2.0, window=5, local_layers=(0,)),
}
BIASED: dict[str, Any] = {
    "norm": "layer_norm",
    "norm_place": "sum",
    "activation": "gelu",
    "linear_bias": True,
    "attention": AttentionConfig(causal=False),
    "bert": BertConfig(pooler=False, pair_head=False),
}
"""A head of masked tokens has a bias, and layers before the product."""


def example() -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(V, (2, S), generator=generator)
    mask = torch.rand(2, S, generator=generator).lt(0.7).float()
    return TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1), loss_mask=mask)


def build(mesh: ParallelMesh | None = None, **changes: Any) -> GPT:
    """The model, any bias of its head not zero."""
    dtype = changes.pop("dtype", torch.float32)
    model = build_model(replace(CONFIG, **changes), mesh, key=RngKey(1), dtype=dtype).train()
    bias = getattr(model.lm_head, "bias", None)
    if bias is not None:
        start = model.lm_head.shard.start  # type: ignore[union-attr]
        with torch.no_grad():
            bias.copy_(torch.arange(start, start + len(bias)).sin())
    return model


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
    [{}, {"tied_embeddings": True, "logit_scale": 0.5}, LIKE_GEMMA, BIASED],
    ids=["own weight", "tied, scaled", "like Gemma", "with bias"],
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
        model = build(**changes)
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


def test_capped_logits_are_never_whole() -> None:
    with largest() as found:
        model = build(logit_softcap=1.5)
        model.loss(example(), counts=counts_of(example()), chunk_tokens=CHUNK).backward()
    assert found.rows == CHUNK


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


def test_heads_that_multiply_in_few_bits_have_whole_logits() -> None:
    model = build_model(CONFIG)
    assert takes_chunks(model.lm_head)
    assert not takes_chunks(None)
    assert model.lm_head is not None
    model.lm_head.linear = Fp8Linear(Fp8Recipe(), emulate=True)
    assert not takes_chunks(model.lm_head)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("few_bits", [True, False])
def test_labels_that_are_no_tokens(few_bits: bool, masked: bool) -> None:
    """-100 leaves one out, with and without a mask; others are refused, where they count."""
    model, batch = build_model(CONFIG), example()
    if few_bits:
        assert model.lm_head is not None
        model.lm_head.linear = Fp8Linear(Fp8Recipe(), emulate=True)
    assert batch.labels is not None
    mask = torch.ones(batch.num_tokens)
    mask[3] = 0.0
    counts = GlobalCounts(tokens=mask.sum().double())
    expected = model.loss(replace(batch, loss_mask=mask), counts=counts)
    for label in (-100, V) if masked else (-100,):
        labels = batch.labels.clone()
        labels[3] = label
        left_out = replace(batch, labels=labels, loss_mask=mask if masked else None)
        assert torch.equal(model.loss(left_out, counts=counts), expected)
        assert model.log_probs(left_out)[3] == 0.0
    for label in (V, -1):
        labels = batch.labels.clone()
        labels[3] = label
        wrong = replace(batch, labels=labels, loss_mask=None)
        message = f"label {label} is outside the vocabulary of {V} \\(0 to {V - 1}\\): give -100"
        with pytest.raises(ValueError, match=message):
            model.loss(wrong, counts=counts)
        with pytest.raises(ValueError, match=message):
            model.log_probs(wrong)


def over_ranks(
    layout: str, changes: dict[str, Any]
) -> tuple[list[str], dict[str, tuple[Tensor, Tensor]]]:
    """Where a layout's gradients differ in chunks and whole, and what this rank has of both."""
    init_from_env(device="cpu")
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    both = []
    for chunk_tokens in (CHUNK, None):
        model = build(mesh, **changes)
        if chunk_tokens is None:
            model._result = lambda hidden, batch, loss, model=model: of_logits(  # type: ignore[method-assign,misc]
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


@pytest.mark.parametrize(
    ("layout", "changes"),
    [("tp=2", {"logit_softcap": 1.5}), ("tp=2,sp", {}), ("tp=2,sp", BIASED)],
    ids=["tp, capped", "sp", "sp, with bias"],
)
def test_shards_of_the_vocabulary(ranks: RankPool, layout: str, changes: dict[str, Any]) -> None:
    """331 columns over two ranks: one of them has a column of padding, which gets nothing."""
    for wrong, pairs in ranks.run(over_ranks, 2, layout, changes):
        assert not wrong
        assert pairs["grad/lm_head.weight"][0].abs().max() > 0


def log_prob_gradients(
    model: GPT, *, chunks: bool, tokens: Tensor | None = None
) -> dict[str, Tensor]:
    """Log-probabilities after a change, and the gradients of a loss that reads them twice."""
    batch = replace(example(), loss_mask=tokens) if tokens is not None else example()
    buckets, change = buckets_of(model), SoftCap(2.0)
    head, found = model.lm_head, []
    for last in (False, True):
        if not chunks:
            model._result = lambda hidden, batch, wanted: of_logits(  # type: ignore[method-assign]
                model._logits(hidden),
                batch,
                wanted,  # type: ignore[arg-type]
                group=model.mesh.tp,
                kernels=model.kernels,
                vocab_size=V,
            )
        with largest() as seen:
            value = model.log_probs(batch, changes=[change], chunk_tokens=CHUNK)
            loss = value.exp().sum() + (3 * value).clamp(min=-12).sum()
            if last:
                loss.backward()
            else:
                with buckets.no_sync():
                    loss.backward()
        assert not chunks or head is None or seen.rows <= CHUNK
        found.append(value.detach())
    assert batch.loss_mask is not None
    assert not found[0][batch.loss_mask == 0].any()
    buckets.finish()
    gradients = {name: held.tensor for name, held in buckets.gradients().items()}
    return {"log p": torch.stack(found), **gradients}


def log_probs_over_ranks(
    layout: str, changes: dict[str, Any]
) -> tuple[list[str], dict[str, Tensor]]:
    """Where a layout's log-probabilities or gradients differ in chunks and whole; those in chunks.

    The bound is 1e-10 of float64, 1e-5 of float32.
    """
    init_from_env(device="cpu")
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    wrong, found = [], {}
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        found, other = (
            log_prob_gradients(build(mesh, dtype=dtype, **changes), chunks=chunks)
            for chunks in (True, False)
        )
        wrong += [
            f"{name} {dtype}"
            for name, value in other.items()
            if (found[name] - value).norm() > bound * value.norm()
        ]
    mesh.close()
    return wrong, found


@pytest.mark.parametrize(
    "changes",
    [{"logit_softcap": 1.5}, LIKE_GEMMA, BIASED],
    ids=["capped", "like Gemma", "with bias"],
)
def test_log_probabilities_in_chunks_are_those_of_whole_logits(
    ranks: RankPool, changes: dict[str, Any]
) -> None:
    wrong, alone = log_probs_over_ranks("tp=1", changes)
    assert not wrong
    for layout in ("tp=2", "tp=2,sp"):
        for wrong, found in ranks.run(log_probs_over_ranks, 2, layout, changes):
            assert not wrong, layout
            assert (found["log p"] - alone["log p"]).abs().max() < 1e-10


def test_no_token_counts() -> None:
    found = log_prob_gradients(build(), chunks=True, tokens=torch.zeros(2 * S))
    assert all(not value.any() for value in found.values())


def test_log_probabilities_need_labels() -> None:
    batch = replace(example(), labels=None)
    with pytest.raises(ValueError, match="log-probabilities need labels, and the batch has none"):
        build().log_probs(batch)


@pytest.mark.parametrize(
    ("changes", "layout"),
    [({}, "dp=1"), ({}, "dp=1,zero=2"), ({"tied_embeddings": True}, "dp=1")],
    ids=["buffer", "reduced each time", "tied"],
)
def test_the_cost_of_a_head_is_what_it_keeps(changes: dict[str, Any], layout: str) -> None:
    """In bytes, from forward to backward; and as many logits at a time as the estimate says."""
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    model = build(mesh, dtype=torch.bfloat16, **changes)
    buckets_of(model)
    batch = example()
    kept: dict[int, int] = {}
    sizes = ModelShape(
        hidden_size=CONFIG.hidden_size,
        vocab_size=V,
        layers=shape("llama-3-8b").layers[:1],
        tied_embeddings=model.config.tied_embeddings,
    )
    work = Workload(batch=2, micro_batch=2, seq_length=S)
    draft = Planner(sizes, machine("h200"), 1).draft(model.mesh.config, work)
    hidden = torch.randn(2 * S, CONFIG.hidden_size, dtype=torch.bfloat16, requires_grad=True)

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        wanted = TokenLoss(counts=counts_of(batch), unit_gradient=True)
        loss = model._result(hidden, batch, wanted)
    assert loss.requires_grad
    of_norm = hidden.numel() * 2
    assert sum(kept.values()) == draft.stages.head.kept - of_norm
    assert ESTIMATED_BYTES == LOGITS_BYTES
