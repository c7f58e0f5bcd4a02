"""Layers beyond the last that predict further tokens: left out, or kept, trained and written."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_ckpt.hf import HFFolder, SafetensorsFolder, load_hf, save_hf
from mcore_models import GPT, GlobalCounts, TokenBatch, build_model
from mcore_models.hf import (
    ARCHITECTURES,
    DEEPSEEK_V3,
    DEEPSEEK_V3_FURTHER,
    GLM4_MOE,
    GLM4_MOE_FURTHER,
)
from mcore_parallel import Group

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

sys.path.append(str(Path(__file__).parent))
import folders  # noqa: E402
from families import FAMILIES, random_model  # noqa: E402
from over_ranks import tensors_of  # noqa: E402

TOKENS = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))
KINDS = {
    "deepseek-v3": (DEEPSEEK_V3, DEEPSEEK_V3_FURTHER),
    "glm-4.5": (GLM4_MOE, GLM4_MOE_FURTHER),
}


def beyond(family: str) -> str:
    return f"model.layers.{FAMILIES[family][1]['num_hidden_layers']}"


def loaded(folder: Path, known: Any = ARCHITECTURES) -> GPT:
    config = HFFolder.open(folder, known=known).model
    assert config.moe is not None
    # Without the balance loss, which reaches what is compared.
    config = replace(config, moe=replace(config.moe, aux_loss_coefficient=0.0))
    model = build_model(config, key=None).eval()
    load_hf(folder, tensors_of(model, "model/"), Group.single(), prefix="model/", known=known)
    return model


def logits(model: GPT) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)


def add_further(folder: Path, family: str) -> dict[str, Tensor]:
    """A layer beyond the last, as it is published; return the folder's tensors."""
    own, count = beyond(family), FAMILIES[family][1]["num_hidden_layers"]
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{count - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        value = tensors[name]
        tensors[name.replace(last, f"{own}.")] = value + 0.1 * torch.randn_like(value)
    size = tensors["model.norm.weight"].numel()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{own}.{name}.weight"] = 1 + 0.2 * torch.randn(size)
    tensors[f"{own}.eh_proj.weight"] = 0.2 * torch.randn(size, 2 * size)
    tensors[f"{own}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{own}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return tensors


@pytest.mark.parametrize("family", KINDS)
def test_further_layers_are_left_out_or_kept(tmp_path: Path, family: str) -> None:
    """As asked for; what is kept goes back bitwise, but for what repeats embedding and head."""
    source, own = folders.save(random_model(family), tmp_path / "hf"), beyond(family)
    known = {KINDS[family][0].name: KINDS[family][1]}
    before = logits(loaded(source))
    torch.manual_seed(0)
    tensors = add_further(source, family)
    model = loaded(source)
    assert not model.mtp
    assert torch.equal(logits(model), before)
    kept = loaded(source, known=known)
    assert torch.equal(logits(kept), before)
    theirs, size = tensors[f"{own}.eh_proj.weight"], kept.config.hidden_size
    ours = kept.get_parameter("mtp.0.project.weight")
    assert torch.equal(ours[:, :size], theirs[:, size:])  # ours has the hidden state's first
    assert torch.equal(ours[:, size:], theirs[:, :size])
    out = tmp_path / "out"
    config = HFFolder.open(source, known=known).config
    for architecture in KINDS[family]:
        made = save_hf(
            out.with_name(f"out{architecture.further}"),
            tensors_of(kept),
            architecture=architecture,
            model=kept.config,
            base_config=config,
        )
        back = SafetensorsFolder(made)
        spare = {f"{own}.embed_tokens.weight", f"{own}.shared_head.head.weight"}
        assert set(back) == set(tensors) - spare
        assert all(torch.equal(back.read(name), tensors[name]) for name in back)
        assert json.loads((made / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert_predicts(kept, tensors, family)


def assert_predicts(model: GPT, tensors: dict[str, Tensor], family: str) -> None:
    """Loss and gradient of the further token, by transformers' own layer and a few lines."""
    theirs, own = random_model(family), beyond(family)
    with torch.no_grad():
        hidden = theirs.model(TOKENS, use_cache=False).last_hidden_state
        embedded = theirs.model.embed_tokens(TOKENS)

    def norm(x: Tensor, name: str) -> Tensor:
        weight = tensors[f"{own}.{name}.weight"]
        return torch.nn.functional.rms_norm(x, (len(weight),), weight, theirs.config.rms_norm_eps)

    joined = torch.cat([norm(embedded[:, 1:], "enorm"), norm(hidden[:, :-1], "hnorm")], -1)
    project = tensors[f"{own}.eh_proj.weight"].clone().requires_grad_()
    entered = joined @ project.T
    # Their last layer, with the weights of the one beyond it, alone.
    layer, prefix = theirs.model.layers[-1], f"{own}."
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
    assert (ours - wanted).norm() < 1e-5 * wanted.norm()
