"""What somebody who knows models tells about a Hugging Face architecture, and how it is found.

Nothing here knows an architecture. A package that does, such as mcore-models, registers one value
for each under the entry-point group `mcore_ckpt.mappings`, called `hf.` and the name that
`config.json` has under `architectures`:

    [project.entry-points."mcore_ckpt.mappings"]
    "hf.LlamaForCausalLM" = "mcore_models.hf:LLAMA"
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from mcore_parallel.mapping import TensorMapping

GROUP = "mcore_ckpt.mappings"
_KIND = "hf."


class Architecture(Protocol):
    """How models of one Hugging Face architecture are described and named here.

    `model` stands for the description, whose type is the provider's own.
    """

    @property
    def name(self) -> str:
        """The class that `config.json` names under `architectures`."""

    def read_config(self, config: Mapping[str, Any]) -> Any:
        """Return the model that a `config.json` describes.

        Raises:
            ValueError: a field is missing, or has a value that is not supported; names the field.
        """

    def write_config(self, model: Any, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the `config.json` of a model; what `base` has beside the architecture is kept.

        Raises:
            ValueError: the architecture cannot express the model; names the field.
        """

    def mapping(self, model: Any) -> TensorMapping:
        """Return the mapping between the tensors of the architecture and ours."""

    def shapes(self, model: Any) -> Mapping[str, tuple[int, ...]]:
        """Return name and shape of every global tensor of ours."""

    def to_tree(self, model: Any) -> dict[str, Any]:
        """Return a model as JSON values: `state["config"]["model"]` of a checkpoint."""

    def from_tree(self, tree: Mapping[str, Any]) -> Any:
        """Return the model that `to_tree` wrote down; ValueError when it is none."""


def find_architecture(
    config: Mapping[str, Any], where: str, known: Mapping[str, Architecture] | None = None
) -> Architecture:
    """Return the architecture that a `config.json` names.

    where: the file, for messages. known: architectures by name, looked at before those that are
        registered.

    Raises:
        ValueError: it names none, or one that nobody registered.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ValueError(f"{where}: architectures is {named!r}, not a list of one name")
    if known is not None and named[0] in known:
        return known[named[0]]
    registered = _registered()
    if named[0] not in registered:
        close = max(registered, key=lambda other: _likeness(named[0], other))
        raise ValueError(
            f"{where}: architectures names {named[0]}, which nothing installed converts; known are "
            f"{', '.join(sorted(registered))} (nearest: {close})"
        )
    return _load(registered[named[0]])


def architecture_for(
    tree: Mapping[str, Any], known: Mapping[str, Architecture] | None = None
) -> Architecture:
    """Return the first architecture that can express a model of ours.

    tree: the model as a checkpoint has it, `state["config"]["model"]`. known: as for
        `find_architecture`.

    Raises:
        ValueError: none can; says why each cannot.
    """
    refusals = []
    candidates = list((known or {}).values())
    if not candidates:
        candidates = [_load(entry) for _, entry in sorted(_registered().items())]
    for architecture in candidates:
        try:
            architecture.write_config(architecture.from_tree(tree))
        except ValueError as error:
            refusals.append(str(error))
        else:
            return architecture
    raise ValueError(f"no Hugging Face architecture can express this model: {'; '.join(refusals)}")


def _likeness(one: str, other: str) -> tuple[float, float]:
    """How much two names of classes are alike: before what the class is for, then as a whole."""
    stems = one.partition("For")[0], other.partition("For")[0]
    alike, whole = (difflib.SequenceMatcher(None, *pair).ratio() for pair in (stems, (one, other)))
    return alike, whole


def _registered() -> dict[str, EntryPoint]:
    found = {
        entry.name.removeprefix(_KIND): entry
        for entry in entry_points(group=GROUP)
        if entry.name.startswith(_KIND)
    }
    if not found:
        raise ValueError(
            "no Hugging Face architecture is known: pip install mcore-models, which brings them"
        )
    return found


def _load(entry: EntryPoint) -> Architecture:
    architecture: Architecture = entry.load()
    return architecture
