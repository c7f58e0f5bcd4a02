"""The mixture-of-experts feed-forward.

T tokens of the micro-batch, N of them routed by this rank, E experts, k chosen for each token,
F inner width of an expert, H hidden, R rows that reach the experts of this rank, D documents.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_models.common.batch import TokenBatch, TokenContext
from mcore_models.common.builder import BuildContext
from mcore_models.common.mlp import build_activation
from mcore_models.config import ModelConfig
from mcore_models.part_configs import MoEConfig
from mcore_parallel import GradSync, Init, ParamSpec, TensorLayout, all_reduce
from mcore_parallel.expert import (
    AllToAll,
    Dispatcher,
    ExpertColumnLinear,
    ExpertRowLinear,
    SequentialLinear,
    join_shares,
    share_of,
    take_share,
)
from mcore_parallel.tensor import Part

BALANCE_LOSS = "moe_balance_loss"
"""The name of the load-balancing loss, summed over all layers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """Where N tokens go.

    scores: softmax over all experts [N, E], fp32. experts: those chosen [N, k] int64, best first.
    weights: by which their outputs are multiplied [N, k], fp32.
    """

    scores: Tensor
    experts: Tensor
    weights: Tensor

    def margin(self) -> float:
        """The least difference of scores between an expert that was chosen and one that was not.

        Rounding below it changes no choice; infinite where there was nothing to choose.
        """
        top_k = self.experts.shape[1]
        if not len(self.scores) or top_k == self.scores.shape[1]:
            return math.inf
        best = self.scores.detach().topk(top_k + 1, dim=-1).values
        return float((best[:, -2] - best[:, -1]).min())


class Router(nn.Module):
    """Scores every token for every expert and chooses the k best (see `MoEConfig`).

    Weight, logits and scores are fp32 also in a 16-bit model, where rounding would change choices.
    Every rank of the tensor-parallel group routes tokens of its own, so that its gradient is a
    share of the sum over that group.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, build: BuildContext) -> None:
        super().__init__()
        self.top_k = moe.top_k
        self.normalise = moe.normalise_top_k
        self._group = build.tp
        self._init = Init(kind="normal", std=config.init_std)
        dtype = torch.promote_types(build.dtype, torch.float32)
        size = (moe.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=build.device))

    def forward(self, tokens: Tensor) -> Routing:
        """Route tokens [N, H]."""
        logits = F.linear(tokens.to(self.weight.dtype), self.weight)
        scores = logits.softmax(-1)
        best, experts = logits.topk(self.top_k, dim=-1)
        # Softmax over the chosen logits is their scores divided by the sum of these.
        weights = best.softmax(-1) if self.normalise else scores.gather(-1, experts)
        return Routing(scores=scores, experts=experts, weights=weights)

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The spec of `weight`, global `<prefix>.weight` [E, H]."""
        group = self._group
        layout = TensorLayout.whole(f"{prefix}.weight", tuple(self.weight.shape))
        spec = ParamSpec(
            layout=layout.replicated(group.rank, group.size),
            init=self._init,
            grad_sync=(GradSync(group=group),) if group.size > 1 else (),
        )
        return {"weight": spec}


class Experts(nn.Module):
    """This rank's experts, MLPs with the model's activation: rows [R, H] to [R, H].

    With expert-tensor parallelism the result is a share of a sum, which `Dispatched.combine` makes.
    Global names are `experts.{gate,up,down}.weight`, stacked on a leading expert axis.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, build: BuildContext) -> None:
        super().__init__()
        width = moe.expert_ffn_size
        gated = config.activation == "swiglu"
        parts = (Part("gate", width), Part("up", width)) if gated else (Part("up", width),)
        self._enter = "gate_up" if gated else "up"
        linear = SequentialLinear(build.kernels.linear)
        enter = ExpertColumnLinear(
            moe.num_experts,
            config.hidden_size,
            parts,
            ep=build.mesh.ep,
            etp=build.mesh.etp,
            bias=config.linear_bias,
            linear=linear,
            init=Init(kind="normal", std=config.init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self.add_module(self._enter, enter)
        self.down = ExpertRowLinear(
            moe.num_experts,
            width,
            config.hidden_size,
            ep=build.mesh.ep,
            etp=build.mesh.etp,
            bias=config.linear_bias,
            linear=linear,
            init=Init(kind="normal", std=config.output_init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self._activation = build_activation(config, build)

    def forward(self, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Rows sorted by expert, `counts[i]` of the i-th expert here."""
        inner = self.get_submodule(self._enter)(rows, counts)
        out: Tensor = self.down(self._activation(inner), counts)
        return out


class MoE(nn.Module):
    """Σ weight · expert(x) over the experts that the router chose for x: [T, H] to [T, H].

    Communicates over ep and etp to reach the experts and back. Ranks of the tensor-parallel group
    route different tokens: under sequence parallelism those whose hidden states they hold, without
    it equal shares of all, which are gathered again. When the context asks for auxiliary losses,
    the load-balancing loss of this layer is attached to the output; its counts are summed over the
    tensor- and the context-parallel group, which hold parts of one document.
    """

    parallel = True

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__()
        assert config.moe is not None, "a pattern with E has been checked to have it"
        self.config = config.moe
        self.router = Router(config, config.moe, build)
        self.experts = Experts(config, config.moe, build)
        mesh = build.mesh
        self._dispatch: Dispatcher = AllToAll(config.moe.num_experts, ep=mesh.ep, etp=mesh.etp)
        self._tp, self._cp = mesh.tp, mesh.cp
        self._is_cut = build.sequence_parallel

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor:
        """[T, H] to [T, H], or [T / tp, H] under sequence parallelism."""
        tokens = hidden if self._is_cut else take_share(hidden, self._tp)
        routing = self.router(tokens)
        sent = self._dispatch(tokens, routing.experts, routing.weights).wait()
        out = sent.combine(self.experts(sent.rows, sent.counts)).wait()
        auxiliary = context.auxiliary
        if auxiliary is not None and self.config.aux_loss_coefficient:
            share = auxiliary.counts.mean(self._balance_total(routing, context.batch))
            share = share * self.config.aux_loss_coefficient
            out = auxiliary.attach(out, BALANCE_LOSS, share)
        return out if self._is_cut else join_shares(out, self._tp, context.batch.num_tokens)

    def _balance_total(self, routing: Routing, batch: TokenBatch) -> Tensor:
        """My tokens' part of Σ valid tokens · E · Σ_e f_e · P_e over documents (or micro-batches).

        Valid tokens times P_e is the sum of their scores, so that each token adds its own scores,
        weighted by E · f_e: the only sum over ranks that it takes is that of the choices.
        """
        mine = share_of(batch.num_tokens, self._tp)
        valid = torch.ones_like(routing.scores[:, 0])
        if batch.loss_mask is not None:
            valid = batch.loss_mask[mine].to(valid.dtype)
        document, documents = torch.zeros_like(routing.experts[:, 0]), 1
        if self.config.aux_loss_scope == "sequence":
            document, documents = batch.documents()[mine], batch.num_documents
        chosen = torch.zeros_like(routing.scores).scatter_(1, routing.experts, 1.0)
        choices = chosen.new_zeros(documents, chosen.shape[1])
        choices.index_add_(0, document, chosen * valid.unsqueeze(1))
        for group in (self._tp, self._cp):
            choices = all_reduce(choices, group)
        totals = choices.sum(1, keepdim=True)
        shares = choices / totals.masked_fill(totals == 0, 1.0)
        wanted = shares.index_select(0, document) * valid.unsqueeze(1)
        return (routing.scores * wanted).sum() * self.config.num_experts
