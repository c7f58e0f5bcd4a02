"""One layer of a decoder: a mixer and a feed-forward, each a residual step with norms of its own.

T tokens, H hidden; under sequence parallelism a rank holds the hidden states [T / tp, H].
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from mcore_models.common.attention import Attention
from mcore_models.common.builder import (
    BuildContext,
    Builder,
    build_seeded,
    find_builder,
    wants_context,
)
from mcore_models.common.context import TokenContext
from mcore_models.common.delta_net import DeltaNet
from mcore_models.common.latent_attention import LatentAttention
from mcore_models.common.mamba2 import Mamba2
from mcore_models.common.mlp import MLP
from mcore_models.common.moe import MoE
from mcore_models.common.norm import build_norm
from mcore_models.common.residual import Residual
from mcore_models.config import ModelConfig
from mcore_models.pattern import NO_PART
from mcore_parallel import gather_from_group, scatter_to_group
from mcore_parallel.expert import Steps
from mcore_parallel.recompute import recompute, recompute_output

_BUILDERS: dict[str, Builder] = {
    **{"*": Attention, "+": LatentAttention, "M": Mamba2, "G": DeltaNet},
    **{"-": MLP, "E": MoE},
}
_PART_NAMES = {
    **{"*": "attention", "+": "attention", "M": "mamba", "G": "delta_net"},
    **{"-": "mlp", "E": "moe"},
}
_SLOTS = (
    ("mixer", "input_norm", "mixer_out_norm"),
    ("feed_forward", "post_norm", "feed_forward_out_norm"),
)


def check_parts(config: ModelConfig, builders: Mapping[str, Builder]) -> None:
    """Check, without building, that every layer's letters have builders and names of their own.

    Raises:
        ValueError: names the layer, on whatever pipeline stage it will be.
    """
    known = {**_BUILDERS, **builders}
    for index, letters in enumerate(config.layer_pattern):
        for letter in letters.replace(NO_PART, ""):
            find_builder(letter, index, known)
        names = [_PART_NAMES.get(letter) for letter in letters]
        if names[0] == names[1] is not None:
            raise ValueError(
                f"layer {index} would have two parts called {names[0]!r}: "
                f"give each a layer of its own, '{letters[0]}{NO_PART}'"
            )
        if set(letters) == {"M", "G"}:
            raise ValueError(
                f"layer {index} is {letters!r}, and the states of both would be those of layer "
                f"{index}: give each a layer of its own, '{letters[0]}{NO_PART}'"
            )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A part and its norms by module name, how the part is called, and which are recomputed.

    `norm` is what its input passes, `out_norm` its output; None is nothing.
    """

    norm: str | None
    part: str
    out_norm: str | None
    takes_context: bool
    sees_all_tokens: bool
    norm_again: bool
    part_again: bool


class Block(nn.Module):
    """hidden + part(norm(hidden)) for the mixer, then for the feed-forward: [T, H] to [T, H].

    Or with norms after the parts or of the sums, or with both parts of one input, as
    `ModelConfig.norm_place` and `ModelConfig.residual` say.

    The part of a built-in letter has its own name (`attention`, `mlp`, `moe`); one of a builder is
    called `mixer` or `feed_forward`, or what its attribute `part_name` says. Around a part that
    does not declare `parallel = True`, hidden states cut by sequence parallelism are all-gathered
    over the tensor-parallel group and cut again.

    Raises:
        ValueError: a letter that nothing builds, or two parts of one name.
    """

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self._group = build.tp
        self._parallel = config.residual != "sequential"
        self._scale = config.residual_scale
        self._norms_sums = config.norm_place == "sum"
        letters = zip(config.layer_pattern[layer_index], _SLOTS, strict=True)
        self._steps: list[_Step] = []
        for letter, slot in letters:
            if letter != NO_PART:
                self._steps.append(self._add_step(config, build, letter, *slot))

    def _add_step(  # noqa: PLR0917 -- a slot's names
        self,
        config: ModelConfig,
        build: BuildContext,
        letter: str,
        slot: str,
        norm: str | None,
        out_norm: str | None,
    ) -> _Step:
        builder = find_builder(letter, self.layer_index, {**_BUILDERS, **build.builders})
        part = build_seeded(builder, config, build, self.layer_index, letter)
        name = _PART_NAMES.get(letter) or str(getattr(part, "part_name", slot))
        if hasattr(self, name):
            raise ValueError(
                f"layer {self.layer_index} would have two parts called {name!r}: "
                f"give the one of letter {letter!r} another part_name"
            )
        norm = None if config.norm_place in ("post", "sum") else norm
        out_norm = None if config.norm_place == "pre" else out_norm
        if config.residual == "parallel_shared" and self._steps and norm is not None:
            norm = self._steps[0].norm
        elif norm is not None:
            self.add_module(norm, build_norm(config, build, self.layer_index))
        self.add_module(name, part)
        if out_norm is not None:
            self.add_module(out_norm, build_norm(config, build, self.layer_index))
        parallel = bool(getattr(part, "parallel", False))
        if not parallel:
            # It runs alike on every rank: its gradients are whole, not shares of a sum.
            part.__dict__["grad_is_partial"] = False
        return _Step(
            norm=norm,
            part=name,
            out_norm=out_norm,
            takes_context=wants_context(part),
            sees_all_tokens=build.sequence_parallel and not parallel,
            norm_again=norm is not None and build.recompute.recomputes("norm"),
            part_again=build.recompute.recomputes(name),
        )

    def forward(
        self, hidden: Tensor | Residual, context: TokenContext
    ) -> Tensor | Residual | Steps[Tensor | Residual]:
        """This layer's output, of the kind of `hidden`; with `context.in_turns` the steps to it.

        Of a `Residual` the first norm takes what is pending, and the last part's output stays so.
        """
        if context.in_turns:
            return self._in_turns(hidden, context)
        entered = stream = self._entered(hidden)
        for step in self._steps:
            if self._is_idle(step, stream):
                continue
            source = entered if self._parallel else stream
            out, source = self._output(step, source, context)
            stream = self._add(stream if self._parallel else source, out, step, context)
        return stream if isinstance(hidden, Residual) else stream.settled()

    def _in_turns(
        self, hidden: Tensor | Residual, context: TokenContext
    ) -> Steps[Tensor | Residual]:
        """As `forward`; yields where a part does. What is recomputed runs as one."""
        whole = replace(context, in_turns=False)
        entered = stream = self._entered(hidden)
        for step in self._steps:
            if self._is_idle(step, stream):
                continue
            source = entered if self._parallel else stream
            if step.norm_again or step.part_again or step.sees_all_tokens:
                out, source = self._output(step, source, whole)
            else:
                normed, source = source.normed(self._norm(step.norm))
                found = self._call_part(step, normed, context)
                out = (yield from found) if isinstance(found, Generator) else found
            stream = self._add(stream if self._parallel else source, out, step, context)
        return stream if isinstance(hidden, Residual) else stream.settled()

    def _entered(self, hidden: Tensor | Residual) -> Residual:
        stream = Residual.of(hidden)
        # Parts of one input each norm it: the sum is taken once, before.
        return Residual(stream.settled()) if self._parallel else stream

    def _is_idle(self, step: _Step, stream: Residual) -> bool:
        """Whether there is nothing to do: no tokens, here and on all ranks of tp and cp.

        Only experts then have to do with tokens of other ranks.
        """
        return not len(stream.total) and not isinstance(self.get_submodule(step.part), MoE)

    def _output(
        self, step: _Step, stream: Residual, context: TokenContext
    ) -> tuple[Tensor, Residual]:
        """What a part makes of the normed stream, and the stream with nothing pending."""
        part = partial(self._run_part, step, context)
        norm = self._norm(step.norm)
        again = context.cache is None  # its entries are made once
        if step.part_again and again:
            part = partial(recompute, part)
        if step.norm_again and again:
            assert norm is not None
            total = stream.settled()
            return recompute_output(norm, total, part), Residual(total)
        normed, stream = stream.normed(norm)
        return part(normed), stream

    def _norm(self, name: str | None) -> nn.Module | None:
        """The norm of that name; None where there is none."""
        return None if name is None else self.get_submodule(name)

    def _add(self, stream: Residual, out: Tensor, step: _Step, context: TokenContext) -> Residual:
        """The stream with the output of a part."""
        norm = self._norm(step.out_norm)
        if norm is not None and not self._norms_sums:
            out = norm(out)
        if context.dropout is not None:
            out = context.dropout(out, self.layer_index, step.part)
        stream = stream.plus(out if self._scale == 1 else out * self._scale)
        return Residual(stream.normed(norm)[0]) if self._norms_sums else stream

    def _run_part(self, step: _Step, context: TokenContext, normed: Tensor) -> Tensor:
        """The part's output for this rank's hidden states."""
        if not step.sees_all_tokens:
            return self._call_part(step, normed, context)
        out = self._call_part(step, gather_from_group(normed, self._group, 0), context)
        return scatter_to_group(out, self._group, 0)

    def _call_part(self, step: _Step, normed: Tensor, context: TokenContext) -> Tensor:
        part = self.get_submodule(step.part)
        if not step.takes_context:
            out: Tensor = part(normed)
            return out
        if step.sees_all_tokens and context.dropout is not None:
            assert context.batch.rows is not None
            dropout = replace(context.dropout, rows=context.batch.rows)
            context = replace(context, dropout=dropout)
        out = part(normed, context)
        return out
