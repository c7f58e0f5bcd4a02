"""The model on one process: what it computes, stages by hand, documents, dropout, cache."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_models import GPT, GlobalCounts, ModelConfig, TokenBatch, build_model, gpt2, llama
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey

LLAMA = llama(vocab_size=37, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2)
GPT2 = gpt2(vocab_size=37, hidden_size=32, num_layers=3, num_heads=4, max_positions=16)
DRESSES = pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])


def tokens_like(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(seed))


def labelled(tokens: Tensor, mask: Tensor | None = None, **kwargs: object) -> TokenBatch:
    labels = tokens.roll(-1, 1)
    return TokenBatch.from_samples(tokens, labels=labels, loss_mask=mask, **kwargs)  # type: ignore[arg-type]


@DRESSES
def test_forward_and_backward_reach_every_parameter(config: ModelConfig) -> None:
    model = build_model(config, key=RngKey(7))
    tokens = tokens_like(2, 8)
    logits = model(tokens)
    assert logits.shape == (2, 8, 37)
    batch = labelled(tokens)
    loss = model.loss(batch, counts=GlobalCounts(tokens=16))
    assert batch.labels is not None
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels)
    torch.testing.assert_close(loss, expected)
    assert abs(loss.item() - torch.tensor(37.0).log().item()) < 0.3
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith("qkv.bias"):  # the key part of it has a true gradient of zero
            assert parameter.grad.abs().max() > 0, name


@DRESSES
def test_a_step_of_descent_lowers_the_loss(config: ModelConfig) -> None:
    model = build_model(config)
    batch = labelled(tokens_like(4, 8))
    before = model.loss(batch, counts=GlobalCounts(tokens=32))
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.3 * parameter.grad)
    assert model.loss(batch, counts=GlobalCounts(tokens=32)) < before - 0.05


@DRESSES
def test_attention_is_causal(config: ModelConfig) -> None:
    model = build_model(config)
    tokens = tokens_like(1, 8)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 37
    a, b = model(tokens), model(changed)
    assert torch.equal(a[0, :5], b[0, :5])
    assert (a[0, 5:] - b[0, 5:]).abs().amax(-1).min() > 0


@DRESSES
def test_packed_documents_are_isolated_exactly(config: ModelConfig) -> None:
    """Changing one document leaves the others' logits bit for bit as they were."""
    model = build_model(config)
    tokens = tokens_like(1, 12)
    bounds = torch.tensor([0, 5, 8, 12])

    def logits(tokens: Tensor) -> Tensor:
        return model.stage_forward(TokenBatch.from_samples(tokens, cu_seqlens=bounds))

    whole = logits(tokens)
    changed = tokens.clone()
    changed[0, :5] = (changed[0, :5] + 3) % 37
    assert torch.equal(logits(changed)[5:], whole[5:])
    assert not torch.equal(logits(changed)[:5], whole[:5])
    for start, stop in ((0, 5), (5, 8), (8, 12)):
        alone = model(tokens[:, start:stop])[0]
        torch.testing.assert_close(whole[start:stop], alone, rtol=1e-5, atol=1e-6)


@DRESSES
@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_two_stages_by_hand_equal_the_whole(config: ModelConfig, counts: tuple[int, int]) -> None:
    whole = build_model(config, key=RngKey(5))
    parallel = ParallelConfig(pp=2, stage_layers=counts)
    stages = [
        build_model(
            config,
            ParallelMesh.arithmetic(parallel, world_size=2, rank=rank),
            key=RngKey(5),
        )
        for rank in range(2)
    ]
    batch, total = labelled(tokens_like(2, 8)), GlobalCounts(tokens=16)
    expected = whole.loss(batch, counts=total)
    expected.backward()
    hidden = stages[0].stage_forward(batch)
    assert hidden.shape == (16, 32)
    loss = stages[1].loss(batch, hidden, counts=total)
    loss.backward()
    assert torch.equal(loss, expected)
    found = _gradients(stages[0])
    for name, gradient in _gradients(stages[1]).items():
        found[name] = found[name] + gradient if name in found else gradient
    want = _gradients(whole)
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


def _gradients(model: GPT) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad
    return gradients


def test_stages_hold_their_layers_by_global_name() -> None:
    parallel = ParallelConfig(pp=3)
    names = []
    for rank in range(3):
        mesh = ParallelMesh.arithmetic(parallel, world_size=3, rank=rank)
        model = build_model(LLAMA, mesh, device="meta")
        names.append({name.removesuffix(".weight") for name, _ in model.named_parameters()})
    assert "embedding" in names[0]
    assert "layers.1.attention.qkv" in names[1]
    assert not names[0] & names[1]
    assert {"final_norm", "lm_head"} <= names[2]


def test_explicit_layers_of_a_stage() -> None:
    mesh = ParallelMesh.arithmetic(ParallelConfig(pp=2), world_size=2, rank=1)
    model = build_model(LLAMA, mesh, device="meta", stage_layers=[2])
    assert list(model.layers) == ["2"]
    assert model.is_last


def test_tied_embeddings_are_one_parameter_on_one_stage() -> None:
    model = build_model(GPT2)
    names = [name for name, _ in model.named_parameters()]
    assert "embedding.weight" in names
    assert not any("lm_head" in name for name in names)
    spec = model.specs()["embedding.weight"]
    assert [f.num_replicas for f in spec.layout.fragments] == [1]
    assert spec.grad_sync == ()


def test_tied_embeddings_on_two_stages_are_replicas_of_one_tensor() -> None:
    """Both ends hold the same global tensor, equal from the start, summed over the two (U31)."""
    parallel = ParallelConfig(pp=3)
    models, specs = [], []
    for rank in range(3):
        mesh = ParallelMesh.arithmetic(parallel, world_size=3, rank=rank)
        models.append(build_model(GPT2, mesh, key=RngKey(2)))
        specs.append(models[-1].specs())
    assert "embedding.weight" not in specs[1]
    ends = [specs[0]["embedding.weight"], specs[2]["embedding.weight"]]
    for index, (spec, model) in enumerate(zip(ends, (models[0], models[2]), strict=True)):
        fragments = spec.layout.fragments
        assert [(f.name, f.replica, f.num_replicas) for f in fragments] == [
            ("embedding.weight", index, 2)
        ]
        assert [sync.group for sync in spec.grad_sync] == [model.mesh.embedding]
    assert torch.equal(models[0].embedding.weight, models[2].embedding.weight)
    assert "position_embedding.weight" not in specs[2]


def test_loss_counts_valid_tokens_over_the_global_batch() -> None:
    """Cutting the batch into micro-batches changes neither loss nor gradient (U26)."""
    model = build_model(LLAMA)
    tokens = tokens_like(3, 8)
    mask = torch.ones(3, 8)
    mask[0, 1:] = 0
    mask[1, 5:] = 0
    total = GlobalCounts(tokens=mask.sum())
    whole = model.loss(labelled(tokens, mask), counts=total)
    whole.backward()
    want = {name: gradient.clone() for name, gradient in _gradients(model).items()}
    model.zero_grad()
    parts = [
        model.loss(labelled(tokens[i : i + 1], mask[i : i + 1]), counts=total) for i in range(3)
    ]
    for part in parts:
        part.backward()
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    for name, gradient in _gradients(model).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("tokens", [0, torch.tensor(0.0)])
def test_a_batch_without_valid_tokens_has_loss_and_gradient_zero(tokens: float | Tensor) -> None:
    model = build_model(LLAMA)
    loss = model.loss(
        labelled(tokens_like(1, 4), torch.zeros(1, 4)), counts=GlobalCounts(tokens=tokens)
    )
    loss.backward()
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in _gradients(model).values())


def test_labels_under_the_mask_may_be_anything() -> None:
    model = build_model(LLAMA)
    tokens, mask = tokens_like(1, 4), torch.ones(1, 4)
    mask[0, 2] = 0
    batch = labelled(tokens, mask)
    clean = model.loss(batch, counts=GlobalCounts(tokens=3))
    assert batch.labels is not None
    labels = batch.labels.clone()
    labels[2] = -100
    torch.testing.assert_close(
        model.loss(replace(batch, labels=labels), counts=GlobalCounts(tokens=3)), clean
    )


def test_dropout_follows_key_and_row_only() -> None:
    model = build_model(replace(LLAMA, dropout=0.5))
    tokens = tokens_like(3, 8)
    batch = TokenBatch.from_samples(tokens, sample_ids=[4, 9, 6])
    one = model.stage_forward(batch, rng=RngKey(1))
    assert torch.equal(one, model.stage_forward(batch, rng=RngKey(1)))
    assert not torch.equal(one, model.stage_forward(batch, rng=RngKey(2)))
    alone = TokenBatch.from_samples(tokens[1:2], sample_ids=[9])
    torch.testing.assert_close(model.stage_forward(alone, rng=RngKey(1)), one[8:16])
    other = TokenBatch.from_samples(tokens[1:2], sample_ids=[3])
    assert not torch.allclose(model.stage_forward(other, rng=RngKey(1)), one[8:16], atol=1e-3)
    model.eval()
    torch.testing.assert_close(model(tokens), build_model(LLAMA)(tokens))


def test_dropout_without_a_key_is_an_error_not_silence() -> None:
    model = build_model(replace(LLAMA, dropout=0.5))
    with pytest.raises(ValueError, match=r"dropout=0\.5.*rng=RngKey.*eval\(\)"):
        model(tokens_like(1, 4))
    batch = replace(TokenBatch.from_samples(tokens_like(1, 4)), rows=None)
    with pytest.raises(ValueError, match="rows in the batch"):
        model.stage_forward(batch, rng=RngKey(0))


class ListCache:
    """The simplest cache: the sequences of one batch, all of the same length so far."""

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        new = tuple(x.unflatten(0, (self.sequences, -1)) for x in (k, v))
        if layer in self.kept:
            new = tuple(torch.cat(pair, 1) for pair in zip(self.kept[layer], new, strict=True))
        self.kept[layer] = (new[0], new[1])
        length = new[0].shape[1]
        bounds = torch.arange(self.sequences + 1, dtype=torch.int32) * length
        return new[0].flatten(0, 1), new[1].flatten(0, 1), bounds, length


@DRESSES
def test_decoding_through_a_cache_equals_the_whole_forward(config: ModelConfig) -> None:
    model = build_model(config).eval()
    tokens = tokens_like(2, 9)
    cache = ListCache(2)
    pieces = []
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        positions = torch.arange(start, stop).expand(2, -1)
        batch = TokenBatch.from_samples(tokens[:, start:stop], positions=positions)
        pieces.append(model.stage_forward(batch, cache=cache).unflatten(0, (2, -1)))
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=1e-4, atol=1e-5)


def test_logits_of_chosen_tokens_only() -> None:
    model = build_model(LLAMA)
    batch = TokenBatch.from_samples(tokens_like(2, 4))
    some = model.stage_forward(batch, logits_at=torch.tensor([3, 7]))
    torch.testing.assert_close(some, model.stage_forward(batch)[[3, 7]])


def test_a_model_can_be_copied() -> None:
    model = build_model(LLAMA)
    twin = copy.deepcopy(model)
    tokens = tokens_like(1, 4)
    assert torch.equal(model(tokens), twin(tokens))
    assert twin.embedding.weight is not model.embedding.weight


def test_wrong_calls_are_told_so() -> None:
    meshes = [ParallelMesh.arithmetic(ParallelConfig(pp=2), world_size=2, rank=r) for r in (0, 1)]
    first, last = (build_model(GPT2, mesh) for mesh in meshes)
    batch = TokenBatch.from_samples(tokens_like(1, 4))
    with pytest.raises(ValueError, match=r"stage 0 of 2.*stage_forward"):
        first(tokens_like(1, 4))
    with pytest.raises(ValueError, match="stage 0 of 2 starts from the tokens"):
        first.stage_forward(batch, torch.zeros(4, 32))
    with pytest.raises(ValueError, match="stage 1 of 2 needs"):
        last.stage_forward(batch)
    model = build_model(GPT2)
    with pytest.raises(ValueError, match=r"17 tokens.*max_positions=16"):
        model(tokens_like(1, 17))
    with pytest.raises(ValueError, match="labels"):
        model.loss(batch, counts=GlobalCounts(tokens=4))
