"""Softmax loss over vocabulary shards: `mcore_kernels.protocols.VocabLossOp`."""

from mcore_kernels.implementation import Implementation, Operator
from mcore_kernels.ops.cross_entropy.reference import ReferenceVocabLoss

OPERATOR = Operator(
    "cross_entropy",
    (
        Implementation(
            op="cross_entropy",
            name="reference",
            fn=ReferenceVocabLoss(),
            summary="plain torch",
        ),
    ),
)
