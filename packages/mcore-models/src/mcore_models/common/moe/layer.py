"""The mixture-of-experts feed-forward.

T tokens of the micro-batch, t of them with hidden states here, N of them routed by this rank,
k experts chosen for each token, H hidden.
"""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mcore_models.common.builder import BuildContext
from mcore_models.common.context import TokenContext
from mcore_models.common.mlp import MLP
from mcore_models.common.moe.balance import (
    Z_LOSS,
    balance_total,
    choices_of,
    loss_names,
    z_total,
)
from mcore_models.common.moe.capacity import keep_within_capacity
from mcore_models.common.moe.experts import Experts, LatentLinear, SharedGate, padded_experts
from mcore_models.common.moe.router import Router, Routing
from mcore_models.common.moe.tokens import RoutedTokens
from mcore_models.config import ModelConfig
from mcore_parallel import ParallelMesh, all_reduce
from mcore_parallel.expert import (
    Dispatcher,
    DispatcherFactory,
    PermuteOp,
    Steps,
    Turns,
    finish,
    join_shares,
    make_dispatcher,
    share_of,
    take_share,
)


class MoE(nn.Module):
    """Σ weight · expert(x) over the experts that the router chose for x: [T, H] to [T, H].

    Communicates over ep and etp to reach the experts and back. Ranks of the tensor-parallel group
    route different tokens: under sequence parallelism those whose hidden states they hold, without
    it equal shares of all, which are gathered again. While tokens are on their way the shared
    experts run. When the context asks for auxiliary losses, those of this layer are attached to the
    output, and its choices are counted.

    dispatcher: makes what moves tokens, in place of the one that the mesh's configuration names.
    permute: moves copies of tokens to rows and back, in place of the kernel that was chosen.
    """

    parallel = True

    def __init__(
        self,
        config: ModelConfig,
        build: BuildContext,
        layer_index: int,
        *,
        dispatcher: DispatcherFactory | None = None,
        permute: PermuteOp | None = None,
    ) -> None:
        super().__init__()
        assert config.moe is not None, "a pattern with E has been checked to have it"
        moe, mesh = config.moe, build.mesh
        self.config = moe
        self.layer_index = layer_index
        self.router = Router(config, moe, build, layer_index)
        self.experts = Experts(config, moe, build)
        if moe.latent_size is not None:
            down, up = (config.hidden_size, moe.latent_size), (moe.latent_size, config.hidden_size)
            self.latent_down = LatentLinear(down, config.init_std, build)
            self.latent_up = LatentLinear(up, config.output_init_std, build)
        if moe.shared_ffn_size:
            width = replace(config, ffn_size=moe.shared_ffn_size)
            self.shared = MLP(width, build, layer_index)
            if moe.shared_gate:
                self.shared_gate = SharedGate(config, build)
        # Kernels see of a `RowOrder` what an assignment of theirs has, too.
        self._permute: PermuteOp = permute or cast(PermuteOp, build.kernels.moe_permute)
        make: DispatcherFactory = dispatcher or partial(
            make_dispatcher, mesh.config.dispatcher, drops=moe.capacity_factor is not None
        )
        self._dispatch: Dispatcher = make(
            moe.num_experts,
            ep=mesh.ep,
            etp=mesh.etp,
            permute=self._permute,
            overlap=mesh.config.overlap,
        )
        self.turns: Turns | None = None
        self._mesh = mesh
        self._is_cut = build.sequence_parallel

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor | Steps[Tensor]:
        """[T, H] to [T, H], or [T / tp, H] under sequence parallelism.

        With `context.in_turns` the steps to it, which yield while tokens travel.
        """
        steps = self._steps(hidden, context)
        if context.in_turns:
            return steps
        return finish(steps) if self.turns is None else self.turns.finish(steps)

    def _steps(self, hidden: Tensor, context: TokenContext) -> Steps[Tensor]:
        mesh, moe = self._mesh, self.config
        tokens = RoutedTokens(
            batch=context.batch,
            mine=share_of(context.batch.num_tokens, mesh.tp),
            tp=mesh.tp,
            cp=mesh.cp,
            key=context.rng,
            training=self.training,
        )
        mine = hidden if self._is_cut else take_share(hidden, mesh.tp)
        routing = self.router(mine, tokens)
        experts, size = routing.experts, None
        if moe.capacity_factor is not None and self.training:
            kept = keep_within_capacity(routing, tokens, moe)
            experts = kept.experts
            size = self._room(kept.capacity) if moe.pad_to_capacity else None
        latent = mine if moe.latent_size is None else self.latent_down(mine)
        sent = self._dispatch(latent, experts, routing.weights)
        shared = self._shared(hidden, context)
        mark = self._mark(latent)
        yield
        arrived = sent.wait()
        rows, counts = self._after(mark, arrived.rows), arrived.counts
        if size is None:
            outputs = self.experts(rows, counts)
        else:
            outputs = padded_experts(self.experts, rows, counts, size, self._permute)
        returning = arrived.combine(outputs)
        mark = self._mark(outputs)
        yield
        out = self._after(mark, returning.wait())
        out = cast(Tensor, _UpToHere.apply(out))  # type: ignore[no-untyped-call]
        out = out if moe.latent_size is None else self.latent_up(out)
        out = self._attach_losses(out, routing, tokens, context)
        out = out if self._is_cut else join_shares(out, mesh.tp, context.batch.num_tokens)
        return out if shared is None else out + shared

    def _mark(self, x: Tensor) -> Tensor | None:
        return None if self.turns is None else self.turns.mark(x)

    def _after(self, mark: Tensor | None, received: Tensor) -> Tensor:
        """Where a backward pass waits for tokens, the forward pass it is paired with goes on."""
        if self.turns is None or mark is None:
            return received
        return self.turns.after(mark, received)

    def _shared(self, hidden: Tensor, context: TokenContext) -> Tensor | None:
        """What every token gets."""
        if not self.config.shared_ffn_size:
            return None
        out: Tensor = self.shared(hidden, context)
        return out * self.shared_gate(hidden) if self.config.shared_gate else out

    def _room(self, capacity: Tensor) -> int:
        """How many rows an expert here may get of all ranks whose tokens it sees.

        Several of these ranks may route tokens of one replica, which counts once. Reduces over ep
        and etp, and is read on the host.
        """
        share = capacity.double() / _replica_mates(self._mesh)
        total = all_reduce(all_reduce(share, self._mesh.ep), self._mesh.etp)
        return round(float(total))

    def _attach_losses(
        self, out: Tensor, routing: Routing, tokens: RoutedTokens, context: TokenContext
    ) -> Tensor:
        auxiliary, moe = context.auxiliary, self.config
        if auxiliary is None:
            return out
        names = loss_names(moe)
        for scope, coefficient in moe.balance_losses:
            total = balance_total(routing, tokens, moe, scope, self.router.load)
            share = auxiliary.counts.mean(total) * coefficient
            out = auxiliary.attach(out, names[scope], share)
        if moe.z_loss_coefficient:
            share = auxiliary.counts.mean(z_total(routing, tokens)) * moe.z_loss_coefficient
            out = auxiliary.attach(out, Z_LOSS, share)
        return auxiliary.count(out, self.layer_index, choices_of(routing, tokens))


class _UpToHere(torch.autograd.Function):
    """The identity, which keeps an empty tensor.

    A second run ends with the last tensor that is kept. On a rank without tokens nothing may follow
    in other layers, and the outputs of the others' tokens have to come back all the same.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        return grad


def take_turns(model: nn.Module) -> Turns:
    """Return what the expert layers of a model take turns by where tokens travel.

    Made and given to them when they have none yet, so that all who run the model share it.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    turns = next((layer.turns for layer in layers if layer.turns is not None), None) or Turns()
    for layer in layers:
        layer.turns = turns
    return turns


def _replica_mates(mesh: ParallelMesh) -> int:
    """How many ranks of my ep × etp block route tokens of the same micro-batches as I do."""
    block = mesh.config.expert_view().members(mesh.rank, ("etp", "ep"))
    replica = mesh.config.dense_view().members(mesh.rank, ("tp", "cp"))
    return len(set(block) & set(replica))
