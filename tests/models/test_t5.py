"""T5: counted, its distances, isolated by document, and a loss by its definition."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_inference.cache import ContiguousCache
from mcore_models import (
    T5,
    AttentionConfig,
    GlobalCounts,
    ModelConfig,
    T5Config,
    TokenBatch,
    build_model,
    check_layout,
    count_parameters,
)
from mcore_models.common.recompute import RecomputeConfig
from mcore_models.common.relative_bias import biased_attention, distance_buckets
from mcore_models.common.text import Text
from mcore_models.t5 import paired_batch
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey, all_gather_object, all_reduce
from mcore_parallel.testing import RankPool

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    head_dim=8,
    ffn_size=40,
    position="none",
    activation="geglu_tanh",
    tied_embeddings=True,
    init_std=0.3,
    attention=AttentionConfig(scale=1.0),
    t5=T5Config(num_decoder_layers=3, num_buckets=8, max_distance=9),
)
CPU = torch.device("cpu")


def a_batch() -> TokenBatch:
    """Three pairs of texts of several lengths, 10 positions each for the decoder, 14 to read."""
    generator = torch.Generator().manual_seed(1)

    def draw(width: int) -> Tensor:
        return torch.randint(61, (3, width), generator=generator)

    batch = paired_batch(
        draw(10),
        draw(14),
        lengths=torch.tensor([10, 4, 7]),
        source_lengths=torch.tensor([9, 14, 2]),
    )
    mask = (draw(10) % 3 > 0).float().flatten()
    return replace(batch, labels=draw(10).flatten(), loss_mask=mask)


def built(config: ModelConfig = CONFIG, **options: Any) -> T5:
    model = build_model(config, **options)
    assert isinstance(model, T5)
    return model


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, tied_embeddings=False, activation="relu"),
        replace(CONFIG, t5=T5Config(), norm="layer_norm", head_dim=None),
    ],
)
def test_the_formula_counts_the_built_model(config: ModelConfig) -> None:
    sizes = {n: p.numel() for n, p in build_model(config, device="meta").named_parameters()}
    count = count_parameters(config)
    assert count.total == sum(sizes.values())
    products = sum(n for name, n in sizes.items() if "norm" not in name and "bias" not in name)
    embedding = sizes["embedding.weight"]
    assert count.matmul == products - (0 if config.tied_embeddings else embedding)
    assert count.embedding == embedding


def test_distances_by_hand() -> None:
    """Eight buckets up to 9: four a direction, of which two are for 0 and 1 alone."""
    both = distance_buckets(12, num_buckets=8, max_distance=9, causal=False, device=CPU)
    # 2 + log(d / 2) / log(4.5) · 2 reaches 3 at d = 2 · 4.5^½ = 4.24.
    assert both[0].tolist() == [0, 5, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7]
    assert both[:, 0].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3]
    causal = distance_buckets(12, num_buckets=8, max_distance=9, causal=True, device=CPU)
    # 4 + log(d / 4) / log(9 / 4) · 4: 5 at 4.9, 6 at 6, 7 at 7.35.
    assert causal[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 7, 7, 7, 7]
    assert not causal[0].any()


def test_attention_with_a_bias_is_that_of_each_document_alone() -> None:
    """Packed documents, one of them empty, and rows past the last; gradients of the bias too."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v, bias = draw(12, 2, 4), draw(12, 2, 4), draw(12, 2, 4), draw(2, 5, 5)
    tensors = [x.requires_grad_() for x in (q, k, v, bias)]
    bounds = torch.tensor([0, 5, 5, 8, 10], dtype=torch.int32)
    text = Text(cu_seqlens=bounds, max_seqlen=5)
    out = biased_attention(q, k, v, bias, text=text, scale=0.7)
    assert not out[10:].any()
    parts = []
    for start, stop in ((0, 5), (5, 8), (8, 10)):
        size = stop - start
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) * 0.7
        weights = (scores + bias[:, :size, :size]).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[start:stop]))
    expected = torch.cat(parts)
    torch.testing.assert_close(out[:10], expected)
    direction = draw(10, 2, 4)
    found = torch.autograd.grad((out[:10] * direction).sum(), tensors)
    wanted = torch.autograd.grad((expected * direction).sum(), tensors)
    torch.testing.assert_close(found, wanted)


def test_the_loss_by_its_definition() -> None:
    model, batch = built(), a_batch()
    assert batch.loss_mask is not None
    assert batch.labels is not None
    counts = GlobalCounts(tokens=float(batch.loss_mask.sum()))
    loss = model.loss(batch, counts=counts)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    chosen = batch.loss_mask > 0
    logits = model.stage_forward(batch)[chosen, :61]
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch.labels[chosen]))


def test_documents_are_isolated_exactly() -> None:
    """Neither another pair of texts nor padding changes a bit; its own source does."""
    model, batch = built().eval(), a_batch()
    source = batch.source
    assert source is not None
    with torch.no_grad():
        before = model.stage_forward(batch)
        read, tokens = source.tokens.clone(), batch.tokens.clone()
        read[14:28] = (read[14:28] + 1) % 61  # the second text to read
        read[9:14] = 0  # padding of the first
        tokens[20:30] = (tokens[20:30] + 1) % 61  # the third decoder's
        changed = replace(batch, tokens=tokens, source=replace(source, tokens=read))
        after = model.stage_forward(changed)
    assert torch.equal(before[:10], after[:10])
    assert not torch.isclose(before[10:14], after[10:14]).all(-1).any()
    tokens = batch.tokens.clone()
    tokens[9] = (tokens[9] + 1) % 61
    with torch.no_grad():
        later = model.stage_forward(replace(batch, tokens=tokens))
    assert torch.equal(before[:9], later[:9])
    assert not torch.equal(before[9], later[9])


def test_dropout_follows_key_and_row_only() -> None:
    model, batch = built(replace(CONFIG, dropout=0.5)), a_batch()
    one, same = (model.stage_forward(batch, rng=RngKey(1)) for _ in range(2))
    assert torch.equal(one, same)
    assert not torch.equal(one, model.stage_forward(batch, rng=RngKey(2)))
    with pytest.raises(ValueError, match="rng=RngKey"):
        model.stage_forward(batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": "rope"}, "position=rope and t5"),
        ({"linear_bias": True}, "linear_bias=True and t5"),
        ({"attention": AttentionConfig(window=4)}, "attention=.* and t5"),
        ({"num_kv_heads": 2}, "num_kv_heads=2 of num_heads=4 and t5"),
        ({"t5": {"num_buckets": 6}}, "num_buckets=6 is halved.*use 4 or 8"),
        ({"t5": {"max_distance": 16}}, "max_distance=16 must exceed the 16 single"),
        ({"t5": {"num_decoder_layers": 0}}, "t5.num_decoder_layers=0"),
    ],
)
def test_what_a_config_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_what_it_does_not_run_with() -> None:
    for layout, message in (
        ("lanes=2", "lanes=2 let others compute .* use lanes=1"),
        ("cp=8", r"cp=8: 4 heads with a bias \(of tp=1\) cannot .* over 8 ranks: use 4"),
        ("pp=6", "5 layers are fewer than pp = 6"),
    ):
        with pytest.raises(ValueError, match=message):
            check_layout(CONFIG, ParallelConfig.parse(layout))
    with pytest.raises(ValueError, match=r"has no 'moe'; it has core_attn, mlp, norm"):
        build_model(CONFIG, recompute=RecomputeConfig(mode="selective", parts=("moe",)))
    with pytest.raises(ValueError, match="one of 2 shares of its documents and cp=1"):
        built().stage_forward(a_batch().share(0, 2))
    with pytest.raises(ValueError, match=r"keeps two texts: give a cache with a source"):
        built().stage_forward(a_batch(), cache=ContiguousCache())
    with pytest.raises(ValueError, match=r"reads batch\.source"):
        built().stage_forward(replace(a_batch(), source=None))
    batch = replace(a_batch(), source=TokenBatch.from_samples(torch.zeros(3, 4).long()))
    with pytest.raises(ValueError, match="has 3 documents and the batch that reads it 6"):
        built().stage_forward(batch)


def through_stages(layout: str, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss and every whole gradient, of stages that hand on in one process."""
    config = ParallelConfig.parse(layout)
    line, batch = config.line, a_batch()
    stages = [
        built(
            mesh=ParallelMesh.arithmetic(config, world_size=config.pp, rank=rank),
            dtype=torch.float64,
            **options,
        )
        for rank in range(config.pp)
    ]
    hidden: Tensor | None = None
    for place in range(line.last):
        stage, chunk = line.place(place)
        hidden = stages[stage].stage_forward(batch, hidden, chunk=chunk)
    assert batch.loss_mask is not None
    counts = GlobalCounts(tokens=float(batch.loss_mask.sum()))
    loss = stages[line.place(line.last)[0]].loss(batch, hidden, counts=counts)
    loss.backward()
    found: dict[str, Tensor] = {}
    for model in stages:
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            found[name] = found[name] + gradient if name in found else gradient
    return loss.item(), found


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ("pp=2", CONFIG),
        ("pp=5", CONFIG),
        ("pp=2,stages=1+4", replace(CONFIG, tied_embeddings=False)),
        ("pp=2,schedule=interleaved,chunks=2,stages=0+3+0+2", CONFIG),
        ("pp=2,schedule=zb-v,chunks=2", CONFIG),
    ],
)
def test_stages_hand_on_both_texts(layout: str, config: ModelConfig) -> None:
    """Encoder and decoder meet anywhere; biases and both embeddings get their whole gradient."""
    loss, gradients = through_stages("pp=1", config=config)
    other, found = through_stages(layout, config=config)
    assert other == pytest.approx(loss, rel=1e-12)
    assert found.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(mode="full", layers_together=2),
        RecomputeConfig(mode="full", first_layers=1),
        RecomputeConfig(mode="selective", parts=("core_attn", "mlp", "norm")),
    ],
)
def test_recomputed_it_is_the_same_bit_for_bit(recompute: RecomputeConfig) -> None:
    loss, gradients = through_stages("pp=1")
    other, found = through_stages("pp=1", recompute=recompute)
    assert other == loss
    for name, value in gradients.items():
        assert torch.equal(found[name], value), name


def loss_and_gradients(layout: ParallelConfig) -> tuple[float, dict[str, Tensor]]:
    """The loss and every whole gradient, of ranks of tp and cp."""
    mesh = ParallelMesh.create(layout)
    assert mesh is not None
    model, batch = built(mesh=mesh, dtype=torch.float64), a_batch()
    assert batch.loss_mask is not None
    counts = GlobalCounts(tokens=float(batch.loss_mask.sum()))
    multiple = mesh.tp.size if mesh.config.sequence_parallel else 1
    loss = model.loss(batch.share(mesh.cp.rank, mesh.cp.size, multiple=multiple), counts=counts)
    loss.backward()
    specs, pieces = model.specs(), []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient = all_reduce(parameter.grad, mesh.cp).clone()
        for sync in specs[name].grad_sync:
            flat = gradient.view(-1)[sync.start : sync.stop]
            flat.copy_(all_reduce(flat.clone(), sync.group))
        for fragment in specs[name].layout.fragments:
            view = gradient.as_strided(fragment.box.shape, fragment.strides, fragment.offset)
            pieces.append((fragment.name, fragment.global_shape, fragment.box, view.clone()))
    found: dict[str, Tensor] = {}
    for theirs in all_gather_object(pieces, mesh.world):
        for name, shape, box, view in theirs:
            whole = found.setdefault(name, torch.full(shape, torch.nan, dtype=view.dtype))
            rows = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            whole[rows] = view
    return all_reduce(loss.detach(), mesh.cp).item(), found


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp", "tp=4", "cp=4", "cp=2,tp=2,sp"])
def test_over_ranks_it_is_the_same_model(ranks: RankPool, layout: str) -> None:
    """From the same initial values the same loss and gradients, of documents cut anyhow."""
    loss, gradients = loss_and_gradients(ParallelConfig())
    parallel = ParallelConfig.parse(layout)
    for other, theirs in ranks.run(loss_and_gradients, parallel.model_size, parallel):
        assert other == pytest.approx(loss, rel=1e-6)
        assert theirs.keys() == gradients.keys()
        for name, value in gradients.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-6, atol=1e-8, msg=name)
