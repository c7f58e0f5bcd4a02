"""What DeepSeek's folders have besides a model: further predictions, other types."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_ckpt.hf import HFFolder, SafetensorsFolder, load_hf, save_hf
from mcore_models import GPT, GlobalCounts, TokenBatch, build_model
from mcore_models.hf import ARCHITECTURES, DEEPSEEK_V3, DEEPSEEK_V3_FURTHER
from mcore_parallel import Group

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

sys.path.append(str(Path(__file__).parent))
import folders  # noqa: E402
from families import FAMILIES, random_model  # noqa: E402
from over_ranks import tensors_of  # noqa: E402

TOKENS = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))
FURTHER = {DEEPSEEK_V3.name: DEEPSEEK_V3_FURTHER}
LAYERS = FAMILIES["deepseek-v3"][1]["num_hidden_layers"]
BEYOND = f"model.layers.{LAYERS}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folders.save(random_model("deepseek-v3"), tmp_path / "hf")


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def loaded(folder: Path, known: Any = ARCHITECTURES) -> GPT:
    model = build_model(HFFolder.open(folder, known=known).model, key=None).eval()
    load_hf(folder, tensors_of(model, "model/"), Group.single(), prefix="model/", known=known)
    return model


def logits(model: GPT) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)


def test_queries_without_a_rank_and_halves_that_turn() -> None:
    fields = {
        **FAMILIES["deepseek-v3"][1],
        **{"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
        **{"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    }
    torch.manual_seed(0)
    theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**fields)).eval()
    config = DEEPSEEK_V3.read_config(theirs.config.to_dict())
    assert config.latent is not None
    assert config.latent.q_rank is None
    model = build_model(config).eval()
    with torch.no_grad():
        expected = theirs(TOKENS, use_cache=False).logits
        # Through a folder's names, without a folder.
        weights = theirs.state_dict()
        for layer in range(1, 2):
            fused = weights.pop(f"model.layers.{layer}.mlp.experts.gate_up_proj")
            down = weights.pop(f"model.layers.{layer}.mlp.experts.down_proj")
            for i, (both, out) in enumerate(zip(fused, down, strict=True)):
                block = f"model.layers.{layer}.mlp.experts.{i}"
                gate, up = both.chunk(2)
                weights |= {f"{block}.gate_proj.weight": gate, f"{block}.up_proj.weight": up}
                weights[f"{block}.down_proj.weight"] = out
        fill(model, weights)
    assert (logits(model) - expected).norm() < 1e-4 * expected.norm()


def fill(model: GPT, theirs: dict[str, Tensor]) -> None:
    from mcore_parallel.mapping import TensorMeta, evaluate

    metas = {name: TensorMeta(tuple(x.shape), x.dtype) for name, x in theirs.items()}
    ours = evaluate(DEEPSEEK_V3.mapping(model.config).forward(metas), theirs)
    for local in tensors_of(model).values():
        for fragment, view in local.views():
            view.copy_(ours.pop(fragment.name))
    assert not ours


def add_further(folder: Path) -> dict[str, Tensor]:
    """A layer beyond the last, as DeepSeek publishes it; return the folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{LAYERS - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        value = tensors[name]
        tensors[name.replace(last, f"{BEYOND}.")] = value + 0.1 * torch.randn_like(value)
    size = tensors["model.norm.weight"].numel()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{BEYOND}.{name}.weight"] = 1 + 0.2 * torch.randn(size)
    tensors[f"{BEYOND}.eh_proj.weight"] = 0.2 * torch.randn(size, 2 * size)
    tensors[f"{BEYOND}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{BEYOND}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def test_further_layers_are_left_out_or_kept(source: Path, tmp_path: Path) -> None:
    """As asked for; what is kept goes back bitwise, but for what repeats embedding and head."""
    before = logits(loaded(source))
    torch.manual_seed(0)
    tensors = add_further(source)
    model = loaded(source)
    assert not model.mtp
    assert torch.equal(logits(model), before)
    kept = loaded(source, known=FURTHER)
    assert torch.equal(logits(kept), before)
    theirs, size = tensors[f"{BEYOND}.eh_proj.weight"], kept.config.hidden_size
    ours = kept.get_parameter("mtp.0.project.weight")
    assert torch.equal(ours[:, :size], theirs[:, size:])  # ours has the hidden state's first
    assert torch.equal(ours[:, size:], theirs[:, :size])
    out = tmp_path / "out"
    config = HFFolder.open(source, known=FURTHER).config
    for architecture in (DEEPSEEK_V3, DEEPSEEK_V3_FURTHER):
        made = save_hf(
            out.with_name(f"out{architecture.further}"),
            tensors_of(kept),
            architecture=architecture,
            model=kept.config,
            base_config=config,
        )
        back = SafetensorsFolder(made)
        spare = {f"{BEYOND}.embed_tokens.weight", f"{BEYOND}.shared_head.head.weight"}
        assert set(back) == set(tensors) - spare
        assert all(torch.equal(back.read(name), tensors[name]) for name in back)
        assert json.loads((made / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert_predicts(kept, tensors)


def assert_predicts(model: GPT, tensors: dict[str, Tensor]) -> None:
    """Loss and gradient of the further token, by transformers' own layer and a few lines."""
    theirs = random_model("deepseek-v3")
    with torch.no_grad():
        hidden = theirs.model(TOKENS, use_cache=False).last_hidden_state
        embedded = theirs.model.embed_tokens(TOKENS)

    def norm(x: Tensor, name: str) -> Tensor:
        weight = tensors[f"{BEYOND}.{name}.weight"]
        return torch.nn.functional.rms_norm(x, (len(weight),), weight, theirs.config.rms_norm_eps)

    joined = torch.cat([norm(embedded[:, 1:], "enorm"), norm(hidden[:, :-1], "hnorm")], -1)
    project = tensors[f"{BEYOND}.eh_proj.weight"].clone().requires_grad_()
    entered = joined @ project.T
    # Their last layer, with the weights of the one beyond it, alone.
    layer, prefix = theirs.model.layers[-1], f"{BEYOND}."
    weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    count = theirs.config.n_routed_experts
    for part in ("gate", "up", "down"):
        names = [f"mlp.experts.{i}.{part}_proj.weight" for i in range(count)]
        weights[part] = torch.stack([weights.pop(name) for name in names])
    weights["mlp.experts.gate_up_proj"] = torch.cat([weights.pop("gate"), weights.pop("up")], 1)
    weights["mlp.experts.down_proj"] = weights.pop("down")
    layer.load_state_dict({name: weights[name] for name in layer.state_dict()})
    length = entered.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    turned = theirs.model.rotary_emb(entered, positions)
    out = layer(entered, attention_mask=mask, position_ids=positions, position_embeddings=turned)
    out = out[0] if isinstance(out, tuple) else out
    logits = norm(out, "shared_head.norm") @ tensors["lm_head.weight"].T
    labels = TOKENS[:, 2:]
    total = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum"
    )
    counts = GlobalCounts(tokens=2 * 19)
    mask = torch.ones(2, 20)
    mask[:, -1] = 0
    batch = TokenBatch.from_samples(TOKENS, labels=TOKENS.roll(-1, 1), loss_mask=mask)
    auxiliary = model.train().auxiliary_losses(counts)
    model.loss(batch, counts=counts, auxiliary=auxiliary).backward()
    found = auxiliary.shares()["mtp_loss_0"]
    assert abs(float(found) / float(total.detach() / 38) - 1) < 1e-5
    assert model.config.mtp is not None
    (total / 38 * model.config.mtp.loss_weight).backward()
    size, ours = model.config.hidden_size, model.get_parameter("mtp.0.project.weight").grad
    assert ours is not None
    assert project.grad is not None
    wanted = project.grad.roll(size, 1)  # ours has the columns of the hidden state first
    # Within what the balance loss of its experts adds.
    assert (ours - wanted).norm() < 5e-4 * wanted.norm()


def test_a_folder_keeps_its_own_type() -> None:
    """Kimi K2 has DeepSeek's class and a type of its own."""
    config = DEEPSEEK_V3.write_config(
        DEEPSEEK_V3.read_config({**FAMILIES["deepseek-v3"][1]}), {"model_type": "kimi_k2"}
    )
    assert config["model_type"] == "kimi_k2"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first_k_dense_replace": 4}, "first_k_dense_replace=4 leaves none.*at most 3"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"q_lora_rank": 2.5}, "q_lora_rank=2.5 must be of type int"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DEEPSEEK_V3.read_config({**FAMILIES["deepseek-v3"][1], **fields})
