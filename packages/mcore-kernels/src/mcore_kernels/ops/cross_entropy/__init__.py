"""Softmax loss over vocabulary shards: `mcore_kernels.protocols.VocabLossOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.cross_entropy.eager import EagerVocabLoss
from mcore_kernels.ops.cross_entropy.reference import ReferenceVocabLoss
from mcore_kernels.requirements import TRITON, needs_device

OPERATOR = Operator(
    "cross_entropy",
    (
        Implementation(
            op="cross_entropy",
            name="reference",
            fn=ReferenceVocabLoss(),
            summary="plain torch",
        ),
        Implementation(
            op="cross_entropy",
            name="eager",
            fn=EagerVocabLoss(),
            requires=(needs_device("cpu"),),
            priority=10,
            summary="plain torch, a few rows at a time",
        ),
        Implementation(
            op="cross_entropy",
            name="triton",
            fn="mcore_kernels.ops.cross_entropy.triton:VOCAB_LOSS",
            requires=TRITON,
            priority=20,
            summary="reads the logits once for each result; no copy of them",
        ),
    ),
)
