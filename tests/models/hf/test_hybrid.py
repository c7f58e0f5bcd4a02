"""Mamba-2, Nemotron-H and Qwen3-Next folders against transformers: in over any layout, and out."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.hf import HFFolder, SafetensorsFolder, load_hf
from mcore_inference import LLM, SamplingParams
from mcore_models import GPT, ModelConfig, build_model, count_parameters, preset
from mcore_models.hf import ARCHITECTURES
from mcore_models.recurrent_presets import RECURRENT_PRESETS
from mcore_parallel import Group, ParallelConfig
from mcore_parallel.testing import RankPool

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
import folders  # noqa: E402
from over_ranks import logits_and_export, tensors_of  # noqa: E402

TOKENS = torch.randint(97, (2, 13), generator=torch.Generator().manual_seed(1))
_SHAPE = {"vocab_size": 100, "hidden_size": 32, "initializer_range": 0.2}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
FAMILIES = ("mamba2", "mamba2-tied", "nemotron-h", "qwen3-next")


def random_model(family: str) -> Any:
    """A small model, whose vectors are not what they begin with."""
    torch.manual_seed(0)
    if family.startswith("mamba2"):
        more = {"n_groups": 2, "use_bias": True}
        if family == "mamba2-tied":
            more = {"n_groups": 1, "tie_word_embeddings": True, "use_conv_bias": False}
            more["time_step_limit"] = (0.01, 0.5)  # type: ignore[assignment]
        config = transformers.Mamba2Config(
            num_hidden_layers=2, num_heads=8, head_dim=8, expand=2, state_size=6, chunk_size=4,
            **_SHAPE, **more,
        )  # fmt: skip
        model = transformers.Mamba2ForCausalLM(config)
    elif family == "nemotron-h":
        kinds = ["linear_attention", "moe", "full_attention", "mlp"]
        config = transformers.NemotronHConfig(
            layers_block_type=kinds, head_dim=8, ssm_state_size=6, mamba_num_heads=8,
            mamba_head_dim=8, n_groups=2, chunk_size=4, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=24, moe_shared_expert_intermediate_size=40, moe_latent_size=16,
            routed_scaling_factor=2.0, **_SHAPE, **_ATTENTION,
        )  # fmt: skip
        model = transformers.NemotronHForCausalLM(config)
    else:
        config = transformers.Qwen3NextConfig(
            num_hidden_layers=4, head_dim=16, linear_key_head_dim=6, linear_value_head_dim=8,
            linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=24,
            shared_expert_intermediate_size=40, num_experts_per_tok=2, num_experts=4,
            mlp_only_layers=[1], **_SHAPE, **_ATTENTION,
        )  # fmt: skip
        model = transformers.Qwen3NextForCausalLM(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1 and not name.endswith("inv_freq"):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.eval()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrid")
    return {name: folders.save(random_model(name), root / name) for name in FAMILIES}


def loaded(folder: Path, config: ModelConfig) -> GPT:
    model = build_model(config, key=None).eval()
    load_hf(
        folder, tensors_of(model, "model/"), Group.single(), prefix="model/", known=ARCHITECTURES
    )
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_gradients_and_config(sources: dict[str, Path], tmp_path: Path, family: str) -> None:
    """Those of transformers; and what it counts, in the config's words and in ours."""
    folder = HFFolder.open(sources[family], known=ARCHITECTURES)
    config, ours = folder.model, loaded(sources[family], folder.model)
    theirs = random_model(family)
    found, expected = ours(TOKENS), theirs(TOKENS, use_cache=False).logits
    assert (found - expected).abs().max() < 1e-4
    assert count_parameters(config).total == sum(p.numel() for p in theirs.parameters())
    direction = torch.randn_like(expected)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    wanted = dict(loaded(tmp_path / "gradients", config).named_parameters())
    total = torch.stack([value.norm() for value in wanted.values()]).norm()
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            distance = (parameter.grad - wanted[name]).norm()
            assert distance < 1e-3 * max(wanted[name].norm(), 1e-3 * total), name
    written = folder.architecture.write_config(config)
    assert folder.architecture.read_config(written) == config
    again = transformers.AutoConfig.for_model(**written)
    assert type(theirs)(again).num_parameters() == theirs.num_parameters()


PUBLISHED = {
    **{"mamba2-130m": 128_989_632, "mamba2-370m": 368_346_624, "mamba2-780m": 604_431_936},
    **{"mamba2-1.3b": 1_343_757_312, "mamba2-2.7b": 2_702_599_680},
    "mamba-codestral-7b": 7_285_403_648,
    "nemotron-h-8b": 8_100_852_736,
    "qwen3-next-80b-a3b": 79_674_391_296,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    """The sum of the tensors of each release, which transformers' class has, too."""
    assert set(PUBLISHED) == set(RECURRENT_PRESETS)
    model = preset(name)
    letters = "".join(model.layer_pattern)
    kind = "Qwen3Next" if "G" in letters else "NemotronH" if "*" in letters else "Mamba2"
    config = ARCHITECTURES[f"{kind}ForCausalLM"].write_config(model)
    with torch.device("meta"):
        theirs = getattr(transformers, f"{kind}ForCausalLM")(
            transformers.AutoConfig.for_model(**config)
        )
    assert theirs.num_parameters() == count_parameters(model).total == PUBLISHED[name]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mamba2", "tp=2,pp=2"),
        ("mamba2-tied", "tp=2"),
        ("nemotron-h", "tp=2,pp=2"),
        ("nemotron-h", "ep=2"),
        ("qwen3-next", "tp=2,pp=2"),
        ("qwen3-next", "ep=2"),
    ],
)
def test_in_over_ranks_and_out_again(
    ranks: RankPool, sources: dict[str, Path], tmp_path: Path, family: str, layout: str
) -> None:
    """Fused projections cut by heads and groups: the same logits, and back bit for bit (U42)."""
    parallel, source, out = ParallelConfig.parse(layout), sources[family], tmp_path / "out"
    world = 4 if "," in layout else 2
    results = ranks.run(logits_and_export, world, source, out, TOKENS, parallel)
    with torch.no_grad():
        expected = random_model(family)(TOKENS, use_cache=False).logits
    found = [logits for logits in results if logits is not None]
    assert len(found) == parallel.tp * (2 if "ep" in layout else 1)
    for logits in found:
        assert (logits - expected).abs().max() < 1e-4
    if "ep" in layout:
        return  # what replicas export is for those that shard over them
    back, original = SafetensorsFolder(out), SafetensorsFolder(source)
    assert set(back) == set(original)
    for name in original:
        a, b = back.read(name), original.read(name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name
    config = json.loads((out / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize("family", ["mamba2", "nemotron-h", "qwen3-next"])
def test_what_it_generates(sources: dict[str, Path], family: str) -> None:
    """Token by token from states and keys: what transformers finds most likely without a cache."""
    prompt = "word3 word5 hello"
    [completion] = LLM.from_hf(sources[family]).generate([prompt], SamplingParams(max_tokens=8))
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources[family])
    tokens, model = tokenizer(prompt)["input_ids"], random_model(family)
    start = len(tokens)
    for _ in completion.token_ids:
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1, :97]
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-3, "two tokens are nearly equal: a coin toss"
        tokens.append(int(logits.argmax()))
    assert list(completion.token_ids) == tokens[start:]
    assert len(completion.token_ids) > 2


def nemotron(**fields: Any) -> dict[str, Any]:
    return {"hybrid_override_pattern": "M-*-", "architectures": ["NemotronHForCausalLM"], **fields}


def test_patterns_and_lists_of_layers() -> None:
    """Nemotron-H has had a letter, two sets of names, and numbers of layers, for the same."""
    known = ARCHITECTURES["NemotronHForCausalLM"]
    model = known.read_config(nemotron())
    assert model.layer_pattern == ("M.", ".-", "*.", ".-")
    names = ["mamba", "mlp", "attention", "mlp"]
    listed = {"hybrid_override_pattern": None, "layers_block_type": names}
    assert known.read_config(nemotron(**listed)) == model
    shorter = known.read_config(nemotron(hybrid_override_pattern="M*-"))
    assert known.write_config(shorter, nemotron())["hybrid_override_pattern"] == "M*-"
    assert known.write_config(shorter, nemotron(num_hidden_layers=4))["num_hidden_layers"] == 3
    written = known.write_config(shorter, listed)
    assert written["layers_block_type"] == ["linear_attention", "full_attention", "mlp"]
    assert known.read_config(nemotron(attention_dropout=0.1, hidden_dropout=0.1)) == model
    alone = known.read_config(nemotron(hybrid_override_pattern="MM"))
    assert (alone.num_heads, alone.moe, alone.layer_pattern) == (0, None, ("M.", "M."))


def test_layers_of_qwen3_next() -> None:
    known = ARCHITECTURES["Qwen3NextForCausalLM"]
    base = {"vocab_size": 5, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
    base["intermediate_size"] = 96
    model = known.read_config(base)
    assert model.layer_pattern == ("GE", "GE", "GE", "*E", "GE")
    assert model.rotary_size == 64
    more = known.read_config({**base, "full_attention_interval": 2, "mlp_only_layers": [0]})
    assert more.layer_pattern == ("G-", "*E", "GE", "*E", "GE")
    written = known.write_config(more, base)
    assert written["layer_types"] == ["linear_attention", "full_attention"] * 2 + [
        "linear_attention"
    ]
    assert known.read_config(written) == more


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Mamba2", {"expand": 3}, "expand=3 of hidden_size=4096 are not the 8192 channels"),
        ("Mamba2", {"time_step_limit": [0.1]}, r"time_step_limit=\[0.1\] must be two numbers"),
        ("Mamba2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("NemotronH", {}, "hybrid_override_pattern=None is not supported: a letter for each"),
        ("NemotronH", nemotron(hybrid_override_pattern="MX"), "'MX' is not supported"),
        ("NemotronH", {"layers_block_type": ["mamba", "rnn"]}, r"\['mamba', 'rnn'\] is not supp"),
        (
            "NemotronH",
            nemotron(hybrid_override_pattern="ME", mlp_bias=True),
            "mlp_bias=True is not supported in layers with experts",
        ),
        ("NemotronH", nemotron(time_step_min="small"), "time_step_min='small' must be of type"),
    ],
)
def test_what_is_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ARCHITECTURES[f"{name}ForCausalLM"].read_config(fields)


def test_what_theirs_cannot_say() -> None:
    known = ARCHITECTURES["Qwen3NextForCausalLM"]
    base = {"vocab_size": 5, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    base["intermediate_size"] = 96
    for change, message in (
        ({"layer_types": ["full_attention"] * 4}, "there must be one of each layer, and both"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types of 4 layers are 'GGG'"),
        ({"layer_types": ["mamba"] * 4}, "a list of linear_attention and full_attention"),
        ({"full_attention_interval": -1}, "full_attention_interval=-1 must be at least 1"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            known.read_config({**base, **change})
