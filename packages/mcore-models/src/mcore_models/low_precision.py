"""Linear layers that multiply in few bits, chosen by rules over their names.

The products are those of `mcore_kernels.quant`; here they are put into a model. Embeddings, norms,
routers and heads stay as they are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from mcore_kernels import Target
from mcore_kernels.ops.grouped_linear.fp8 import Fp8GroupedLinear
from mcore_kernels.ops.linear.fp8 import ROLES, Fp8Linear
from mcore_kernels.ops.linear.microscaling import MicroscalingLinear
from mcore_kernels.quant import Fp8Recipe, MicroscalingRecipe, PrecisionRules
from mcore_kernels.quant.scaling import advance_history
from mcore_models.changes import check_matches
from mcore_models.gpt import GPT
from mcore_parallel import Group, all_gather_object, all_reduce
from mcore_parallel.expert import ExpertColumnLinear, ExpertRowLinear
from mcore_parallel.extra import ExtraState
from mcore_parallel.layout import Box, LayoutTensor, TensorLayout
from mcore_parallel.tensor import ColumnParallelLinear, RowParallelLinear

Linear = ColumnParallelLinear | RowParallelLinear
ExpertLinear = ExpertColumnLinear | ExpertRowLinear
Op = Fp8Linear | Fp8GroupedLinear
Recipe = Fp8Recipe | MicroscalingRecipe


class AmaxHistory(nn.Module):
    """The largest values of earlier steps, from which a linear layer takes its scales.

    A module `scales` inside the layer, so that the history is in checkpoints (`KeepsState`). It is
    the same on all ranks that hold a part of the layer, or of an expert.
    """

    def __init__(self, op: Op, tp: Group, ep: Group | None = None) -> None:
        """`tp` are the ranks that hold parts of it; `ep`, of experts, those that hold others."""
        super().__init__()
        self._op, self._tp, self._ep = op, tp, ep

    def extra_state(self) -> ExtraState:
        """Return `history` [3, steps + 1], of experts [3, E, steps + 1].

        The three are inputs, weights and gradients.
        """
        history = self._op.history
        assert history is not None
        shape = tuple(history.shape)
        layout = TensorLayout.whole("history", shape)
        if self._ep is not None:
            whole = (shape[0], shape[1] * self._ep.size, shape[2])
            corner = (0, shape[1] * self._ep.rank, 0)
            layout = TensorLayout.box("history", whole, Box(corner, shape))
        layout = layout.replicated(self._tp.rank, self._tp.size)
        tensors = {"history": LayoutTensor(history, layout)}
        return ExtraState(tensors=tensors, expert=self._ep is not None)

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
        ops: Mapping[str, Op],
        histories: Sequence[tuple[torch.Tensor, bool]],
        counts: Mapping[str, int],
    ) -> None:
        """`histories` are those of the operators in pieces, each with whether it is of experts."""
        self.counts = dict(counts)
        self._ops = dict(ops)
        self._histories = tuple(histories)
        mesh = model.mesh
        self._groups = {False: (mesh.tp, mesh.dp_cp), True: (mesh.etp, mesh.edp)}

    def describe(self) -> str:
        """One line: how many linear layers multiply in what."""
        found = ", ".join(f"{count} in {what}" for what, count in self.counts.items())
        return f"linear layers: {found}"

    @torch.no_grad()
    def advance(self) -> None:
        """End an optimizer step: its largest values, over all ranks, join the histories.

        Communicates over tp and dp_cp, of experts over etp and edp, where there are histories; all
        ranks call it.
        """
        for history, of_experts in self._histories:
            amax = history[..., 0]
            for group in self._groups[of_experts]:
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
    rows and blocks are of what a rank holds. Every expert has scales of its own, as if it were a
    layer by itself. Returns None when nothing multiplies in few bits.

    Every rank of the model's mesh calls it, after the model is built and before it is used. Who
    trains it calls `advance` of what is returned after each optimizer step. That a weight has
    changed shows in its `_version`, which torch counts up where it writes itself, and
    `ShardedOptimizer` for its steps and loads.

    emulate: compute the same numbers by float32 where the device cannot multiply so.

    Raises:
        ValueError: a pattern matches no module on any rank (for a recipe: no linear layer that can
            have one; experts have none of microscaling), or the device cannot multiply so.
    """
    layers: dict[str, Linear | ExpertLinear] = {
        n: m for n, m in model.named_modules() if isinstance(m, Linear | ExpertLinear)
    }
    recipes = {name: _recipe_of(layer, rules.of(name)) for name, layer in layers.items()}
    world = model.mesh.world
    for pattern, name in rules.rules:
        wanted = None if name is None else rules.recipes[name]
        able = [n for n, layer in layers.items() if wanted is None or _recipe_of(layer, wanted)]
        check_matches("precision", [pattern], able, world)
    counts = _count(model, layers, recipes)
    if set(counts) <= {_dtype(model), _expert_dtype(model)}:
        return None
    histories, memory = _histories(recipes, layers, model.mesh.device)
    ops: dict[str, Op] = {}
    for name, layer in layers.items():
        recipe, history = recipes[name], histories.get(name)
        if isinstance(recipe, MicroscalingRecipe):
            assert isinstance(layer, Linear)
            layer.linear = MicroscalingLinear(recipe, model.kernels.target, emulate=emulate)
        elif isinstance(recipe, Fp8Recipe) and isinstance(layer, Linear):
            ops[name] = _eight_bits(model, layer, recipe, emulate, history)
        elif isinstance(recipe, Fp8Recipe):
            assert isinstance(layer, ExpertLinear)
            ops[name] = _experts_in_eight_bits(model, layer, recipe, emulate, history)
    return LowPrecision(model, ops, memory, counts)


def _recipe_of(layer: Linear | ExpertLinear, recipe: Recipe | None) -> Recipe | None:
    """The recipe if the layer can have it: experts have none of microscaling."""
    refused = isinstance(recipe, MicroscalingRecipe) and isinstance(layer, ExpertLinear)
    return None if refused else recipe


def _histories(
    recipes: Mapping[str, Recipe | None],
    layers: Mapping[str, Linear | ExpertLinear],
    device: torch.device,
) -> tuple[dict[str, torch.Tensor], list[tuple[torch.Tensor, bool]]]:
    """The histories by layer; and their memory, those of one shape in one piece.

    Ranks share a piece in one message. With each is said whether it is of experts.
    """
    places: dict[tuple[int, ...], list[str]] = {}
    for name, recipe in recipes.items():
        if isinstance(recipe, Fp8Recipe) and recipe.history:
            layer = layers[name]
            groups = (layer.local_experts,) if isinstance(layer, ExpertLinear) else ()
            places.setdefault((len(ROLES), *groups, recipe.history + 1), []).append(name)
    mine: dict[str, torch.Tensor] = {}
    memory: list[tuple[torch.Tensor, bool]] = []
    for shape, names in places.items():
        piece = torch.zeros(len(names), *shape, device=device)
        mine |= dict(zip(names, piece, strict=True))
        memory.append((piece, len(shape) > 2))
    return mine, memory


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


def _experts_in_eight_bits(
    model: GPT, layer: ExpertLinear, recipe: Fp8Recipe, emulate: bool, history: torch.Tensor | None
) -> Fp8GroupedLinear:
    mesh, kernels = model.mesh, model.kernels
    op = Fp8GroupedLinear(
        recipe,
        layer.local_experts,
        kernels.target,
        emulate=emulate,
        op=None if emulate else kernels.fp8_grouped,
        history=history,
        keeps_weight=mesh.config.sharding != "parameters",
    )
    if layer.etp.size > 1:
        whole = "input" if isinstance(layer, ExpertColumnLinear) else "grad"
        op.reduced = frozenset(ROLES) - {whole}
        op.amax_reduce = partial(all_reduce, group=layer.etp, op="max")
    layer.linear = op
    if history is not None:
        layer.add_module("scales", AmaxHistory(op, layer.etp, layer.ep))
    return op


def _cut_factors(layer: Linear, tp: int, sequence_parallel: bool) -> frozenset[str]:
    """The factors of which tensor-parallel ranks have different parts."""
    if layer.group.size > 1:
        whole = "input" if isinstance(layer, ColumnParallelLinear) else "grad"
        return frozenset(ROLES) - {whole}
    # A layer that is whole on every rank sees the tokens of its rank.
    return frozenset({"input", "grad"} if tp > 1 and sequence_parallel else ())


def _count(
    model: GPT,
    layers: Mapping[str, Linear | ExpertLinear],
    recipes: Mapping[str, Recipe | None],
) -> dict[str, int]:
    """How many linear layers multiply in what, over all pipeline stages; few bits first."""
    mine: Counter[str] = Counter()
    for name, recipe in recipes.items():
        what = _dtype(model) if recipe is None else _text(recipe)
        mine[f"{what} (of experts)" if isinstance(layers[name], ExpertLinear) else what] += 1
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
