"""The Mamba-2 mixer: against transformers, alone and packed, cut over ranks, token by token."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_models import (
    GPT,
    GlobalCounts,
    MambaConfig,
    ModelConfig,
    MoEConfig,
    TokenBatch,
    build_model,
    llama,
)
from mcore_parallel import Group, ParallelConfig, ParallelMesh, RngKey
from mcore_parallel.tensor import gather_logits
from mcore_parallel.testing import RankPool

MAMBA = MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2, chunk_size=4)
PURE = ModelConfig(vocab_size=37, hidden_size=32, num_layers=2, mamba=MAMBA, init_std=0.2)
HYBRID = replace(
    llama(vocab_size=37, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, init_std=0.2),
    pattern=("M-", "*-", "M."),
    mamba=MAMBA,
)
MOE = MoEConfig(num_experts=4, top_k=2, expert_ffn_size=12)
EXPERTS = replace(HYBRID, pattern=("ME", "*-", "M."), moe=MOE)
MODELS = pytest.mark.parametrize(
    "config", [PURE, HYBRID, EXPERTS], ids=["pure", "hybrid", "with experts"]
)


def tokens_like(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(seed))


def with_mamba(config: ModelConfig, **changes: object) -> ModelConfig:
    return replace(config, mamba=replace(MAMBA, **changes))  # type: ignore[arg-type]


# --- what it computes ---------------------------------------------------------------------------


def from_transformers(weights: dict[str, Tensor], mamba: MambaConfig) -> dict[str, Tensor]:
    """Their `Mamba2ForCausalLM` tensors (or gradients of them) under our global names."""
    inner, shared = mamba.inner_size, mamba.num_groups * mamba.state_size
    names = {
        "backbone.embeddings.weight": "embedding.weight",
        "backbone.norm_f.weight": "final_norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    own = {"A_log": "a_log", "D": "d", "dt_bias": "dt_bias", "norm.weight": "norm.weight"}
    own |= {"out_proj.weight": "out.weight", "out_proj.bias": "out.bias"}
    renamed = {}
    for name, value in weights.items():
        if name in names:
            renamed[names[name]] = value
            continue
        layer, _, rest = name.removeprefix("backbone.layers.").partition(".")
        path, part = f"layers.{layer}", rest.removeprefix("mixer.")
        kind = part.rpartition(".")[2]
        if rest == "norm.weight":
            renamed[f"{path}.input_norm.weight"] = value
        elif part in own:
            renamed[f"{path}.mamba.{own[part]}"] = value
        elif part.startswith("in_proj"):
            pieces = value.split([inner, inner, shared, shared, mamba.num_heads])
            for one, piece in zip(("z", "x", "b", "c", "dt"), pieces, strict=True):
                renamed[f"{path}.mamba.{one}.{kind}"] = piece
        else:
            assert part.startswith("conv1d"), name
            rows = value.squeeze(1) if kind == "weight" else value
            for one, piece in zip("xbc", rows.split([inner, shared, shared]), strict=True):
                renamed[f"{path}.mamba.{one}_conv.{kind}"] = piece
    return renamed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_groups": 1, "conv_width": 3, "projection_bias": True},
        {"num_groups": 8, "conv_bias": False, "dt_min": 0.01, "dt_max": 0.05},
    ],
)
def test_logits_and_gradients_of_transformers(changes: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    config = with_mamba(PURE, **changes)
    mamba = config.mamba
    assert mamba is not None
    torch.manual_seed(0)
    theirs = transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            vocab_size=37, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=4,
            expand=1, state_size=6, n_groups=mamba.num_groups, conv_kernel=mamba.conv_width,
            use_conv_bias=mamba.conv_bias, use_bias=mamba.projection_bias, chunk_size=4,
            time_step_limit=mamba.dt_limits, layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=False, initializer_range=0.2,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(("bias", "norm.weight", "D")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    weights = {name: value.detach() for name, value in theirs.named_parameters()}
    model = build_model(config)
    fill(model, from_transformers(weights, mamba))
    tokens = tokens_like(2, 13)
    ours, other = model(tokens), theirs(tokens, use_cache=False).logits
    assert (ours - other).norm() < 1e-5 * other.norm()
    assert (ours - other).abs().max() < 1e-4
    direction = torch.randn_like(other)
    (ours * direction).sum().backward()
    (other * direction).sum().backward()
    gradients = {name: value.grad for name, value in theirs.named_parameters()}
    want = from_transformers(gradients, mamba)  # type: ignore[arg-type]
    total = torch.stack([value.norm() for value in want.values()]).norm()
    found = global_tensors(model, gradients=True)
    assert found.keys() == want.keys()
    for name, reference in want.items():
        bound = 1e-4 * max(reference.norm(), 1e-3 * total)
        assert (found[name] - reference).norm() < bound, name


def global_tensors(model: GPT, *, gradients: bool = False) -> dict[str, Tensor]:
    """Views of every global tensor of a whole model, or of its gradients."""
    specs = model.specs()
    found = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter
        assert tensor is not None, name
        found |= {fragment.name: view for fragment, view in specs[name].layout.views(tensor)}
    return found


def fill(model: GPT, weights: dict[str, Tensor]) -> None:
    ours = global_tensors(model)
    assert ours.keys() == weights.keys()
    with torch.no_grad():
        for name, view in ours.items():
            view.copy_(weights[name])


def test_the_gate_after_the_norm() -> None:
    """norm(y) · weight · silu(z) by hand, group by group."""
    config = with_mamba(PURE, norm_before_gate=True)
    norm = build_model(config).get_submodule("layers.0.mamba.norm")
    y, z = torch.randn(5, 32), torch.randn(5, 32)
    with torch.no_grad():
        norm.weight.normal_()
    groups = y.view(5, 2, 16)
    normed = groups / (groups.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    expected = normed.flatten(1) * norm.weight * z * z.sigmoid()
    torch.testing.assert_close(norm(y, z), expected)
    before = build_model(PURE).get_submodule("layers.0.mamba.norm")
    assert not torch.allclose(before(y, z), normed.flatten(1) * z * z.sigmoid(), atol=1e-2)


@MODELS
def test_it_is_causal_and_reaches_every_parameter(config: ModelConfig) -> None:
    model = build_model(config)
    tokens = tokens_like(1, 9)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 37
    one, other = model(tokens), model(changed)
    assert torch.equal(one[0, :5], other[0, :5])
    assert (one[0, 5:] - other[0, 5:]).abs().amax(-1).min() > 0
    batch = TokenBatch.from_samples(tokens, labels=tokens.roll(-1, 1))
    model.loss(batch, counts=GlobalCounts(tokens=9)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


# --- documents ----------------------------------------------------------------------------------


def local_logits(model: GPT, tokens: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [t, V] of this rank's share of documents packed into one row, by document."""
    mesh = model.mesh
    batch = TokenBatch.from_samples(tokens[None], cu_seqlens=torch.tensor(bounds))
    batch = batch.share(mesh.cp.rank, mesh.cp.size, multiple=mesh.tp.size)
    with torch.no_grad():
        logits = model.stage_forward(batch)
    logits = gather_logits(logits, mesh.tp, vocab_size=37)
    stop = int(batch.cu_seqlens[1])
    return logits[:stop], logits[stop : int(batch.cu_seqlens[-1])]


def isolated(config: ModelConfig, layout: str) -> None:
    """Changing document 1 changes no bit of document 2, which is as if it were alone."""
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.single() if layout == "tp=1" else ParallelMesh.create(parallel)
    assert mesh is not None
    model = build_model(config, mesh)
    tokens = tokens_like(12)  # 12 tokens: sequence parallelism cuts them
    # The bound falls into a chunk of four tokens, onto one, and makes documents of one token.
    for bound in (6, 4, 11, 1):
        first, second = local_logits(model, tokens, [0, bound, 12])
        changed = tokens.clone()
        changed[:bound] = (changed[:bound] + 3) % 37
        other, same = local_logits(model, changed, [0, bound, 12])
        assert torch.equal(same, second)
        assert not torch.equal(other, first)
        alone = tokens[bound:]
        if not model.sequence_parallel:
            by_itself, _ = local_logits(model, alone, [0, len(alone)])
            torch.testing.assert_close(second, by_itself, rtol=1e-5, atol=1e-5)
    mesh.close()


@MODELS
def test_packed_documents_are_isolated_exactly(config: ModelConfig) -> None:
    """U41 in one process."""
    isolated(config, "tp=1")


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp", "cp=2"])
def test_packed_documents_are_isolated_exactly_over_ranks(ranks: RankPool, layout: str) -> None:
    """U41 with heads cut over ranks, and with documents cut over ranks."""
    ranks.run(isolated, 2, HYBRID, layout)


@MODELS
def test_packed_and_batched_samples_agree(config: ModelConfig) -> None:
    """Samples of one length, given as a batch or as documents of a row."""
    model = build_model(config)
    tokens = tokens_like(3, 7)
    packed = torch.cat(local_logits(model, tokens.flatten(), [0, 7, 14, 21]))
    torch.testing.assert_close(packed.view(3, 7, -1), model(tokens), rtol=1e-5, atol=1e-5)


# --- token by token -----------------------------------------------------------------------------


class ListCache:
    """The simplest cache: the sequences of one batch, each grown by the same number of tokens."""

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, tuple[Tensor, ...]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        new = tuple(x.unflatten(0, (self.sequences, -1)) for x in (k, v))
        if layer in self.rows:
            new = tuple(torch.cat(pair, 1) for pair in zip(self.rows[layer], new, strict=True))
        self.rows[layer] = (new[0], new[1])
        length = new[0].shape[1]
        bounds = torch.arange(self.sequences + 1, dtype=torch.int32) * length
        return new[0].flatten(0, 1), new[1].flatten(0, 1), bounds, length

    def recall(self, layer: int) -> tuple[Tensor, ...] | None:
        return self.states.get(layer)

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        self.states[layer] = states


@MODELS
def test_decoding_through_a_cache_equals_the_whole_forward(config: ModelConfig) -> None:
    model = build_model(config).eval()
    tokens = tokens_like(2, 11)
    cache, pieces = ListCache(2), []
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 11)):
        positions = torch.arange(start, stop).expand(2, -1)
        batch = TokenBatch.from_samples(tokens[:, start:stop], positions=positions)
        pieces.append(model.stage_forward(batch, cache=cache).unflatten(0, (2, -1)))
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=1e-5, atol=1e-5)
    inputs, states = cache.states[0]
    assert inputs.shape == (2, 3, 32 + 2 * 2 * 6)
    assert (states.shape, states.dtype) == ((2, 8, 4, 6), torch.float32)


# --- parameters ---------------------------------------------------------------------------------


def test_names_and_shapes_of_the_whole_layer() -> None:
    model = build_model(with_mamba(PURE, projection_bias=True))
    shapes = {
        name.removeprefix("layers.1.mamba."): tuple(view.shape)
        for name, view in global_tensors(model).items()
        if name.startswith("layers.1.mamba.")
    }
    assert shapes == {
        "z.weight": (32, 32),
        "x.weight": (32, 32),
        "b.weight": (12, 32),
        "c.weight": (12, 32),
        "dt.weight": (8, 32),
        "z.bias": (32,),
        "x.bias": (32,),
        "b.bias": (12,),
        "c.bias": (12,),
        "dt.bias": (8,),
        "x_conv.weight": (32, 4),
        "b_conv.weight": (12, 4),
        "c_conv.weight": (12, 4),
        "x_conv.bias": (32,),
        "b_conv.bias": (12,),
        "c_conv.bias": (12,),
        "a_log": (8,),
        "d": (8,),
        "dt_bias": (8,),
        "norm.weight": (32,),
        "out.weight": (32, 32),
        "out.bias": (32,),
    }


def test_initial_values() -> None:
    """As published: rates uniform in [1, 16], step sizes log-uniform in [0.001, 0.1]."""
    mamba = MambaConfig(num_heads=512, head_dim=2, state_size=8, num_groups=4)
    config = ModelConfig(vocab_size=5, hidden_size=64, num_layers=1, mamba=mamba)
    found = global_tensors(build_model(config))
    rates = found["layers.0.mamba.a_log"].exp()
    assert 1 <= rates.min() < 1.2 < 15.8 < rates.max() <= 16.00001
    assert rates.mean().item() == pytest.approx(8.5, abs=0.6)
    steps = torch.nn.functional.softplus(found["layers.0.mamba.dt_bias"])
    assert 0.001 * 0.999 <= steps.min() < 0.00105 < 0.095 < steps.max() <= 0.1 * 1.001
    assert steps.log().mean().item() == pytest.approx(torch.tensor(0.01).log().item(), abs=0.2)
    assert torch.equal(found["layers.0.mamba.d"], torch.ones(512))
    assert torch.equal(found["layers.0.mamba.norm.weight"], torch.ones(1024))
    for part in ("x_conv", "b_conv", "c_conv"):
        weight = found[f"layers.0.mamba.{part}.weight"]
        assert 0.45 < weight.abs().max() <= 0.5
        assert not found[f"layers.0.mamba.{part}.bias"].any()
    assert found["layers.0.mamba.b.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    output = found["layers.0.mamba.out.weight"].std().item()
    assert output == pytest.approx(config.output_init_std, rel=0.05)


def test_what_must_stay_fp32_does_and_what_decays() -> None:
    model = build_model(HYBRID, dtype=torch.bfloat16)
    wide = {name for name, value in model.named_parameters() if value.dtype == torch.float32}
    own = ("a_log", "d", "dt_bias")
    assert wide == {f"layers.{i}.mamba.{name}" for i in (0, 2) for name in own}
    assert model(tokens_like(1, 6)).dtype == torch.bfloat16
    decaying = {name for name, spec in model.specs().items() if spec.decay}
    assert {n for n in decaying if n.startswith("layers.0.mamba.")} == {
        f"layers.0.mamba.{name}.weight" for name in ("in_proj", "conv", "out")
    }


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_hold_the_whole_model_with_the_same_values(groups: int, tp: int) -> None:
    """U42's kind: every fused local tensor says which rows of which global tensors it holds."""
    config = with_mamba(PURE, num_groups=groups, projection_bias=True)
    whole = global_tensors(build_model(config, key=RngKey(3)))
    covered = {name: torch.zeros(value.shape) for name, value in whole.items() if "mamba" in name}
    for rank in range(tp):
        mesh = ParallelMesh.arithmetic(ParallelConfig(tp=tp), world_size=tp, rank=rank)
        model = build_model(config, mesh, key=RngKey(3))
        specs = model.specs()
        for name, parameter in model.named_parameters():
            for fragment, view in specs[name].layout.views(parameter):
                assert torch.equal(view, whole[fragment.name][fragment.box.slices]), fragment.name
                if fragment.name in covered:
                    covered[fragment.name][fragment.box.slices] += 1 / fragment.num_replicas
    for name, count in covered.items():
        assert torch.equal(count, torch.ones_like(count)), name


def test_groups_shared_by_ranks_say_so() -> None:
    """A rank's gradient of B and C is then a share of the sum over the ranks that read them."""
    mesh = ParallelMesh.arithmetic(ParallelConfig(tp=4), world_size=4, rank=3)
    model = build_model(PURE, mesh, device="meta")
    specs = model.specs()
    conv = specs["layers.0.mamba.conv.weight"]
    assert [(s.group.ranks, s.start, s.stop) for s in conv.grad_sync] == [
        ((2, 3), 8 * 4, 14 * 4),
        ((2, 3), 14 * 4, 20 * 4),
    ]
    assert len(specs["layers.0.mamba.in_proj.weight"].grad_sync) == 2
    assert specs["layers.0.mamba.norm.weight"].grad_sync == ()
    norm = model.get_submodule("layers.0.mamba.norm")
    assert isinstance(norm._shared_by, Group)
    assert norm._shared_by.ranks == (2, 3)
