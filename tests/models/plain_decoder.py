"""A decoder written as its formulas say, one head and one document at a time, for comparison.

T tokens, H hidden, D head size; weights by the names of global tensors.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_kernels import rope_cos_sin
from mcore_models import ModelConfig, TokenBatch

ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "squared_relu": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "quick_geglu": "quick_gelu"}


class PlainDecoder:
    """Logits [T, V] of a batch from weights; every layer has attention and an MLP."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.weights = weights

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """The norm of that name over the last dimension; nothing where there is none."""
        weight = self.weights.get(f"{name}.weight")
        if weight is None:
            return x
        if self.config.norm == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()
        x = x * (1 + weight if self.config.zero_centered_norm else weight)
        return x + self.weights.get(f"{name}.bias", torch.zeros(()))

    def __call__(self, batch: TokenBatch) -> Tensor:
        config = self.config
        hidden = self.weights["embedding.weight"][batch.tokens] * config.embedding_scale
        for layer in range(config.num_layers):
            at, entered = f"layers.{layer}", hidden
            out = self.attention(self.norm(hidden, f"{at}.input_norm"), layer, batch)
            hidden = hidden + config.residual_scale * self.norm(out, f"{at}.mixer_out_norm")
            source = hidden if config.residual == "sequential" else entered
            shared = config.residual == "parallel_shared"
            normed = self.norm(source, f"{at}.{'input' if shared else 'post'}_norm")
            out = self.norm(self.mlp(normed, f"{at}.mlp"), f"{at}.feed_forward_out_norm")
            hidden = hidden + config.residual_scale * out
        logits = config.logit_scale * self.linear(self.norm(hidden, "final_norm"), "lm_head")
        cap = config.logit_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def mlp(self, x: Tensor, name: str) -> Tensor:
        config, up = self.config, self.linear(x, f"{name}.up")
        if config.activation not in GATES:
            return self.linear(ACTIVATIONS[config.activation](up), f"{name}.down")
        gate = self.linear(x, f"{name}.gate")
        if config.glu_limit is not None:
            gate = gate.clamp(max=config.glu_limit)
            up = up.clamp(-config.glu_limit, config.glu_limit)
        inner = ACTIVATIONS[GATES[config.activation]](gate) * (up + config.glu_offset)
        return self.linear(inner, f"{name}.down")

    def attention(self, x: Tensor, layer: int, batch: TokenBatch) -> Tensor:
        options, size, at = (
            self.config.attention,
            self.config.head_size,
            f"layers.{layer}.attention",
        )
        q, k, v = (self.linear(x, f"{at}.{part}") for part in "qkv")
        if options.qk_norm == "all":
            q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
        q, k, v = (part.unflatten(-1, (-1, size)) for part in (q, k, v))
        if options.qk_norm == "head":
            q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
        if options.qk_norm == "l2":
            q, k = (p / (p.square().mean(-1, keepdim=True) + 1e-5).sqrt() for p in (q, k))
        q, k = self.turned(q, layer, batch), self.turned(k, layer, batch)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        documents = [
            self.mixed(q[a:b], k[a:b], v[a:b], layer)
            for a, b in pairwise(batch.cu_seqlens.tolist())
        ]
        out = torch.cat(documents).flatten(1)
        if options.gate:
            out = out * torch.sigmoid(self.linear(x, f"{at}.gate"))
        return self.linear(out, f"{at}.o")

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attention of one document [T, Q, D]."""
        options = self.config.attention
        scale = self.config.head_size**-0.5 if options.scale is None else options.scale
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if options.softcap is not None:
            scores = options.softcap * (scores / options.softcap).tanh()
        distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
        seen = distance >= 0
        if options.window is not None and layer in (options.local_layers or range(99)):
            seen &= distance < options.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if options.sinks:
            sinks = self.weights[f"layers.{layer}.attention.sinks"]
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)

    def turned(self, x: Tensor, layer: int, batch: TokenBatch) -> Tensor:
        """Heads [T, heads, D] turned by their positions, pair by pair."""
        options, rope, base = self.config.attention, self.config.rope, self.config.rope_base
        if layer in options.nope_layers:
            return x
        size = rope.rotary_dim or self.config.head_size
        if options.local_rope_base is not None and layer in (options.local_layers or range(99)):
            cos, sin = rope_cos_sin(batch.positions, size, base=options.local_rope_base)
        else:
            cos, sin = rope_cos_sin(batch.positions, size, base=base, scaling=rope.scalings()[0])
        x = x.clone()
        for i in range(size // 2):
            a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + size // 2)
            first, second, c, s = x[..., a], x[..., b], cos[:, i, None], sin[:, i, None]
            turned = torch.stack([first * c - second * s, first * s + second * c], -1)
            x = torch.cat([x[..., :a], turned[..., :1], x[..., a + 1 :]], -1)
            x = torch.cat([x[..., :b], turned[..., 1:], x[..., b + 1 :]], -1)
        return x
