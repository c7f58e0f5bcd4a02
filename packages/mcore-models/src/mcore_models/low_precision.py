"""Linear layers that multiply in few bits, chosen by rules over their names.

The products are those of `mcore_kernels.quant`; here they are put into a model. Embeddings, norms,
routers and heads stay as they are, and so do experts, whose grouped products have no such form.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from mcore_kernels import Target
from mcore_kernels.ops.linear.fp8 import ROLES, Fp8Linear
from mcore_kernels.ops.linear.microscaling import MicroscalingLinear
from mcore_kernels.quant import Fp8Recipe, MicroscalingRecipe, PrecisionRules
from mcore_kernels.quant.scaling import advance_history
from mcore_models.changes import check_matches
from mcore_models.gpt import GPT
from mcore_parallel import Group, all_gather_object, all_reduce
from mcore_parallel.expert import ExpertColumnLinear, ExpertRowLinear
from mcore_parallel.extra import ExtraState
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.tensor import ColumnParallelLinear, RowParallelLinear

Linear = ColumnParallelLinear | RowParallelLinear
Recipe = Fp8Recipe | MicroscalingRecipe


class AmaxHistory(nn.Module):
    """The largest values of earlier steps, from which a linear layer takes its scales.

    A module `scales` inside the layer, so that the history is in checkpoints (`KeepsState`). It is
    the same on all ranks that hold a part of the layer.
    """

    def __init__(self, op: Fp8Linear, tp: Group) -> None:
        super().__init__()
        self._op, self._tp = op, tp

    def extra_state(self) -> ExtraState:
        """Return `history` [3, steps + 1]: of inputs, weights and gradients."""
        history = self._op.history
        assert history is not None
        layout = TensorLayout.whole("history", tuple(history.shape))
        layout = layout.replicated(self._tp.rank, self._tp.size)
        return ExtraState(tensors={"history": LayoutTensor(history, layout)})

    def load_extra_values(self, values: Mapping[str, object]) -> None:
        """Take the history that has been filled into account."""
        self._op.history_loaded()


class LowPrecision:
    """The linear layers of this rank that multiply in few bits; made by `use_low_precision`.

    Attributes:
        counts: how many linear layers of the whole model multiply in what.
    """

    def __init__(
        self,
        model: GPT,
        ops: Mapping[str, Fp8Linear],
        histories: Mapping[int, torch.Tensor],
        counts: Mapping[str, int],
    ) -> None:
        """`histories` are those of the operators by number of steps, stacked."""
        self.counts = dict(counts)
        self._ops = dict(ops)
        self._histories = dict(histories)
        self._groups = model.mesh.tp, model.mesh.dp_cp

    def describe(self) -> str:
        """One line: how many linear layers multiply in what."""
        found = ", ".join(f"{count} in {what}" for what, count in self.counts.items())
        return f"linear layers: {found}"

    @torch.no_grad()
    def advance(self) -> None:
        """End an optimizer step: its largest values, over all ranks, join the histories.

        Communicates over tp and dp_cp where there are histories; all ranks call it.
        """
        for history in self._histories.values():
            amax = history[..., 0]
            for group in self._groups:
                amax = all_reduce(amax, group, op="max")
            history[..., 0] = amax
            advance_history(history)
        for op in self._ops.values():
            # Histories never lose what they have: when all have some, the device is not asked.
            if len(op.seen) < len(op.delayed):
                op.history_loaded()
            op.step_ended(op.seen)


def use_low_precision(
    model: GPT, rules: PrecisionRules, *, emulate: bool = False
) -> LowPrecision | None:
    """Let linear layers of `model` multiply as `rules` say, by the names of their modules.

    Of a weight the numbers are kept for all micro-batches of a step, both ways: two bytes for each
    parameter; not where parameters are sharded. Scales of whole tensors are those of all
    tensor-parallel ranks together, so that a layer computes the same under every layout; those of
    rows and blocks are of what a rank holds. Returns None when nothing multiplies in few bits.

    Every rank of the model's mesh calls it, after the model is built and before it is used. Who
    trains it calls `advance` of what is returned after each optimizer step. That a weight has
    changed shows in its `_version`, which torch counts up where it writes itself, and
    `ShardedOptimizer` for its steps and loads.

    emulate: compute the same numbers by float32 where the device cannot multiply so.

    Raises:
        ValueError: a pattern matches no module on any rank (for a recipe: no linear layer that can
            have one), or the device cannot multiply so.
    """
    linears = {n: m for n, m in model.named_modules() if isinstance(m, Linear)}
    kinds = ExpertColumnLinear | ExpertRowLinear
    experts = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    chosen = [pattern for pattern, recipe in rules.rules if recipe is not None]
    kept = [pattern for pattern, recipe in rules.rules if recipe is None]
    world = model.mesh.world
    check_matches("precision", chosen, list(linears), world)
    check_matches("precision", kept, [*linears, *experts], world)
    recipes = {name: rules.of(name) for name in linears}
    counts = _count(model, recipes, len(experts))
    if not any(recipes.values()) and set(counts) <= {_dtype(model), _expert_dtype(model)}:
        return None
    histories = _histories(recipes, model.mesh.device)
    places = dict.fromkeys(histories, 0)
    ops: dict[str, Fp8Linear] = {}
    for name, recipe in recipes.items():
        if isinstance(recipe, MicroscalingRecipe):
            target = model.kernels.target
            linears[name].linear = MicroscalingLinear(recipe, target, emulate=emulate)
        elif isinstance(recipe, Fp8Recipe):
            history = None
            if recipe.history:
                history = histories[recipe.history][places[recipe.history]]
                places[recipe.history] += 1
            ops[name] = _eight_bits(model, linears[name], recipe, emulate, history)
    return LowPrecision(model, ops, histories, counts)


def _histories(
    recipes: Mapping[str, Recipe | None], device: torch.device
) -> dict[int, torch.Tensor]:
    """Memory for all histories of one length, so that ranks share them in one message."""
    fp8 = [recipe for recipe in recipes.values() if isinstance(recipe, Fp8Recipe)]
    lengths = Counter(recipe.history for recipe in fp8 if recipe.history)
    return {
        steps: torch.zeros(count, len(ROLES), steps + 1, device=device)
        for steps, count in lengths.items()
    }


def _eight_bits(
    model: GPT, layer: Linear, recipe: Fp8Recipe, emulate: bool, history: torch.Tensor | None
) -> Fp8Linear:
    mesh, kernels = model.mesh, model.kernels
    op = Fp8Linear(
        recipe,
        kernels.target,
        emulate=emulate,
        quantize=None if emulate else kernels.quantize,
        matmul=None if emulate else kernels.fp8_matmul,
        history=history,
        keeps_weight=mesh.config.sharding != "parameters",
    )
    op.reduced = _cut_factors(layer, mesh.tp.size, model.sequence_parallel)
    if mesh.tp.size > 1 and op.reduced:
        op.amax_reduce = partial(all_reduce, group=mesh.tp, op="max")
    layer.linear = op
    if history is not None:
        layer.add_module("scales", AmaxHistory(op, mesh.tp))
    return op


def _cut_factors(layer: Linear, tp: int, sequence_parallel: bool) -> frozenset[str]:
    """The factors of which tensor-parallel ranks have different parts."""
    if layer.group.size > 1:
        whole = "input" if isinstance(layer, ColumnParallelLinear) else "grad"
        return frozenset(ROLES) - {whole}
    # A layer that is whole on every rank sees the tokens of its rank.
    return frozenset({"input", "grad"} if tp > 1 and sequence_parallel else ())


def _count(model: GPT, recipes: Mapping[str, Recipe | None], experts: int) -> dict[str, int]:
    """How many linear layers multiply in what, over all pipeline stages; few bits first."""
    mine = Counter(_dtype(model) if one is None else _text(one) for one in recipes.values())
    mine[_expert_dtype(model)] += experts
    total: Counter[str] = sum(all_gather_object(mine, model.mesh.pp), Counter())
    plain = [_dtype(model), _expert_dtype(model)]
    order = [*(what for what in sorted(total) if what not in plain), *plain]
    return {what: total[what] for what in order if total[what]}


def _dtype(model: GPT) -> str:
    return str(model.kernels.target.dtype).removeprefix("torch.")


def _expert_dtype(model: GPT) -> str:
    return f"{_dtype(model)} (of experts)"


def _text(recipe: Recipe) -> str:
    if isinstance(recipe, MicroscalingRecipe):
        return f"{recipe.format} (emulated)"
    formats = f"{recipe.forward_format}/{recipe.grad_format}"
    history = f", from {recipe.history} steps" if recipe.history else ""
    return f"{formats} (scales of {recipe.scaling}s{history})"


def check_recipe(recipe: Recipe, target: Target, *, emulate: bool = False) -> None:
    """ValueError in one line where a device cannot multiply so and `emulate` is not set."""
    reason = None if emulate else recipe.refusal(target)
    if reason is not None:
        raise ValueError(f"low_precision: cannot run on {target.describe()}: {reason}")
