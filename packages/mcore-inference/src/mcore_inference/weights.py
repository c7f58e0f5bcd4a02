"""Taking weights over from a model that is being trained, by layout, while the engine lives."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mcore_ckpt.live import LiveTransfer
from mcore_models import GPT
from mcore_parallel import Group, LayoutTensor, all_gather_object


def model_tensors(model: GPT) -> dict[str, LayoutTensor]:
    """Return the parameters of this rank's part of a model with their layouts, by local name.

    The tensors share storage with the parameters.
    """
    specs = model.specs()
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
    return {name: LayoutTensor(p.data, specs[name].layout) for name, p in parameters.items()}


class WeightLink:
    """The way from tensors of one layout into the parameters of a model of another.

    The copies are planned once, over all ranks; every call then moves what the sources hold at that
    moment into the model's parameters, in place. Where both ends of a copy lie on one rank nothing
    is communicated. Dtypes are converted, each value rounded once: fp32 masters into a bf16 engine.

    Args:
        sources: this rank's part of the weights, by local key, with the global names of the model;
            empty on a rank that only receives. The tensors are kept: they must go on living where
            they are, as the parameters of a `GradientBuckets` do.
        model: the model to fill; None on a rank that only gives.
        group: all ranks that give or receive; they make the link together, and call it together.

    Raises:
        ValueError: the model needs elements that no source holds (names the tensor), or the two
            ends disagree on a shape.
    """

    def __init__(
        self, sources: Mapping[str, LayoutTensor], model: GPT | None, group: Group
    ) -> None:
        targets = {} if model is None else model_tensors(model)
        self.group = group
        self._transfer = LiveTransfer(sources, targets, group)

    def __call__(self, *, refusal: str | None = None, verify: bool = False) -> None:
        """Move the weights; all ranks of the group call it.

        verify: compare checksums of what arrives, the same on every rank.

        Raises:
            RuntimeError: some rank gave a `refusal`; on every rank, before anything has moved.
            CheckpointError: on every rank: something arrived otherwise than it was sent.
        """
        refusals = [text for text in all_gather_object(refusal, self.group) if text is not None]
        if refusals:
            raise RuntimeError(f"weights cannot be updated now: {refusals[0]}")
        self._transfer(verify=verify)
