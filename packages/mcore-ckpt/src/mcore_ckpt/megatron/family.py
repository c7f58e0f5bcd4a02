"""What somebody who knows models tells about those that Megatron-LM trains, and how it is found.

A package that does, such as mcore-models, registers one value for each kind of model under the
entry-point group `mcore_ckpt.mappings`, called `megatron.` and its name:

    [project.entry-points."mcore_ckpt.mappings"]
    "megatron.gpt" = "mcore_models.megatron:GPT"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol

from mcore_ckpt.hf.architecture import GROUP
from mcore_parallel.mapping import TensorMapping

Cut = Literal["whole", "rows", "columns", "gated"]
_KIND = "megatron."


class Family(Protocol):
    """How models of one kind are described and named there.

    `model` stands for the description, whose type is the provider's own. Names of theirs are those
    of sharded checkpoints with one tensor for each layer and each expert.
    """

    @property
    def name(self) -> str:
        """The name it is registered under, without `megatron.`."""

    def read_args(self, args: Mapping[str, Any]) -> Any:
        """Return the model that stored arguments describe; ValueError names what is unsupported."""

    def to_tree(self, model: Any) -> dict[str, Any]:
        """Return a model as JSON values: `state["config"]["model"]` of a checkpoint."""

    def shapes(self, model: Any) -> Mapping[str, tuple[int, ...]]:
        """Return name and shape of every global tensor of ours."""

    def mapping(self, model: Any) -> TensorMapping:
        """Return the mapping between their tensors and ours."""

    def cut(self, model: Any, name: str) -> Cut:
        """Return how tensor-parallel ranks cut a tensor of theirs.

        "rows": along its first dimension. "gated": so, the gate and the rest each by itself.
        "columns": along its second. "whole": every rank has all of it.
        """

    def canonical(self, name: str, layer_offset: int, expert_offset: int) -> str | None:
        """Return the name of what a module calls `name` itself; None for what is no tensor."""

    def stage(
        self,
        model: Any,
        layers: Sequence[int],
        experts: Sequence[int],
        *,
        first: bool,
        last: bool,
    ) -> list[str]:
        """Return the parameters of a pipeline stage in the order in which its modules have them.

        layers, experts: global indices of those that it holds. first, last: of the pipeline.
        """


def find_family(name: str = "gpt", known: Mapping[str, Family] | None = None) -> Family:
    """Return the family that is registered under a name.

    known: looked at before those that installed packages register.

    Raises:
        ValueError: nothing installed has registered it.
    """
    if known is not None and name in known:
        return known[name]
    for entry in entry_points(group=GROUP):
        if entry.name == _KIND + name:
            family: Family = entry.load()
            return family
    raise ValueError(
        f"nothing installed knows models of Megatron-LM of the kind {name}: pip install "
        f"mcore-models, which brings them"
    )
