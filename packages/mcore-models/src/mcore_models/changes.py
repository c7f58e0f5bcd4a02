"""Changes to a model by the names of its modules and tensors: other linears and norms, freezing."""

import difflib
import itertools
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

from torch import nn

from mcore_models.common.builder import BuildContext, seeded
from mcore_models.gpt import GPT
from mcore_parallel import Group, all_gather_object


class Replacement(Protocol):
    """Makes what takes the place of a linear layer, a norm or another module without modules in it.

    It is called as the module was, and answers for its parameters as a `Builder`'s module does:
    `param_specs`, `param_init` or plain parameters that are whole on every rank. It may keep the
    module that was there, whose parameters then have their names below its own.
    """

    def __call__(self, module: nn.Module, name: str, context: BuildContext, /) -> nn.Module:
        """The module for the place `name`; `module`, which would be there, is on `meta`."""
        ...


def replace_modules(
    model: GPT, replacements: Mapping[str, Replacement], context: BuildContext
) -> None:
    """Put other modules in place of those whose names match a pattern (`layers.*.mlp.down`).

    Names are paths of modules with parameters of their own and no modules inside. `*` stands for
    any text, also with dots; the first pattern that matches a name decides. Communicates over
    `mesh.world`.

    Raises:
        ValueError: a pattern matches nothing on any rank; names the nearest module.
    """
    places = [
        name
        for name, module in model.named_modules()
        if not any(True for _ in module.children())
        and any(True for _ in module.parameters(recurse=False))
    ]
    check_matches("replacements", replacements, places, model.mesh.world)
    for name in places:
        found = next((x for x in replacements if fnmatchcase(name, x)), None)
        if found is None:
            continue
        parent, _, last = name.rpartition(".")
        module = model.get_submodule(name)
        with seeded(context.key.fold("replacement", name)):
            new = replacements[found](module, name, context)
        model.get_submodule(parent).add_module(last, new)


def freeze(model: GPT, patterns: Sequence[str]) -> tuple[str, ...]:
    """Let no gradient reach the global tensors whose names match a pattern; return their names.

    Call it before whatever collects gradients is made: on every rank of the model's mesh, since it
    communicates over `mesh.world`. `*` stands for any text, also with dots: `embedding.*`,
    `layers.[0-3].*`.

    Raises:
        ValueError: on every rank alike: a pattern matches no tensor on any rank, or only some of
            those that lie in one local parameter (q, k and v, or gate and up, are trained
            together).
    """
    if not patterns:
        return ()
    specs = model.specs()
    held = {name: tuple(spec.layout.names()) for name, spec in specs.items()}
    names = [name for inside in held.values() for name in inside]
    world = model.mesh.world
    check_matches("freeze", patterns, names, world)
    frozen = {
        local: [x for x in inside if any(fnmatchcase(x, pattern) for pattern in patterns)]
        for local, inside in held.items()
    }
    refuse_together(_torn(held, frozen), world)
    for local, matched in frozen.items():
        if matched:
            model.get_parameter(local).requires_grad_(False)
    return tuple(itertools.chain(*frozen.values()))


def _torn(held: Mapping[str, Sequence[str]], frozen: Mapping[str, Sequence[str]]) -> str | None:
    """What is to be said of the first local parameter of which a part alone is frozen."""
    for local, inside in held.items():
        rest = [x for x in inside if x not in frozen[local]]
        if frozen[local] and rest:
            return (
                f"freeze: {frozen[local][0]} lies in one parameter with {rest[0]}, which no "
                f"pattern matches: freeze both or neither"
            )
    return None


def refuse_together(message: str | None, world: Group) -> None:
    """Raise ValueError on every rank where one has something to say: the first one's message.

    What one rank alone finds, such as a layer of its pipeline stage, would leave the others
    waiting for it. Every rank of `world` calls it.
    """
    said = [message] if world.pg is None else all_gather_object(message, world)
    first = next((x for x in said if x is not None), None)
    if first is not None:
        raise ValueError(first)


def check_matches(what: str, patterns: Collection[str], names: Sequence[str], world: Group) -> None:
    """Require that every pattern matches a name on some rank; all ranks have the same patterns."""
    if not patterns:
        return
    missing = [x for x in patterns if not any(fnmatchcase(name, x) for name in names)]
    for pattern in missing if world.pg is None else _missing_everywhere(missing, world):
        close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{what}: no name matches {pattern!r}{hint}")


def _missing_everywhere(missing: Sequence[str], world: Group) -> list[str]:
    everybody = all_gather_object(list(missing), world)
    return [x for x in missing if all(x in theirs for theirs in everybody)]
