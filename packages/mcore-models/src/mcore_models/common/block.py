"""One layer of a decoder: a mixer and a feed-forward, each a residual step behind its own norm.

T tokens, H hidden; under sequence parallelism a rank holds the hidden states [T / tp, H].
"""

from torch import Tensor, nn

from mcore_models.common.attention import Attention
from mcore_models.common.batch import TokenContext
from mcore_models.common.builder import (
    BuildContext,
    Builder,
    build_seeded,
    find_builder,
    wants_context,
)
from mcore_models.common.mlp import MLP
from mcore_models.common.norm import build_norm
from mcore_models.config import NO_PART, ModelConfig
from mcore_parallel import gather_from_group, scatter_to_group

_BUILDERS: dict[str, Builder] = {"*": Attention, "-": MLP}
_PART_NAMES = {"*": "attention", "-": "mlp"}
_SLOTS = (("input_norm", "mixer"), ("post_norm", "feed_forward"))


class Block(nn.Module):
    """hidden + part(norm(hidden)) for the mixer, then for the feed-forward: [T, H] to [T, H].

    The part of a built-in letter has its own name (`attention`, `mlp`); one of a builder is called
    `mixer` or `feed_forward`, or what its attribute `part_name` says.
    """

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self._group = build.tp
        self._sequence_parallel = build.sequence_parallel
        self._steps: list[tuple[str, str, bool]] = []
        for letter, slot in zip(config.layer_pattern[layer_index], _SLOTS, strict=True):
            if letter != NO_PART:
                self._add_step(config, build, letter, slot)

    def _add_step(
        self, config: ModelConfig, build: BuildContext, letter: str, slot: tuple[str, str]
    ) -> None:
        norm_name, slot_name = slot
        builder = find_builder(letter, self.layer_index, {**_BUILDERS, **build.builders})
        part = build_seeded(builder, config, build, self.layer_index, letter)
        name = _PART_NAMES.get(letter) or str(getattr(part, "part_name", slot_name))
        self.add_module(norm_name, build_norm(config, build, self.layer_index))
        self.add_module(name, part)
        if not getattr(part, "parallel", False):
            # It will see all tokens on every rank: its gradients are whole, not shares of a sum.
            part.__dict__["grad_is_partial"] = False
        self._steps.append((norm_name, name, wants_context(part)))

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor:
        """This layer's output, shaped like `hidden`."""
        for norm_name, name, takes_context in self._steps:
            part = self.get_submodule(name)
            normed = self.get_submodule(norm_name)(hidden)
            alone = not getattr(part, "parallel", False) and self._sequence_parallel
            if alone:
                normed = gather_from_group(normed, self._group, 0)
            out: Tensor = part(normed, context) if takes_context else part(normed)
            if alone:
                out = scatter_to_group(out, self._group, 0)
            if context.dropout is not None:
                out = context.dropout(out, self.layer_index, name)
            hidden = hidden + out
        return hidden
