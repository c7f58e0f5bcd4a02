"""The operators that this package uses but leaves to others to make fast.

Each protocol states what an implementation owes; each has a plain-torch default here, so that
the package works alone. Faster ones are passed in by whoever assembles a model.
"""

from mcore_parallel.protocols.attention import AttentionGradOp, AttentionOp
from mcore_parallel.protocols.linear import Encoded, EncodedLinearOp, LinearOp, TorchLinear
from mcore_parallel.protocols.update import SGD, OnePassRule, UpdateRule
from mcore_parallel.protocols.vocab_loss import TorchVocabLoss, VocabLossOp
from mcore_parallel.torch_attention import TorchAttention

__all__ = [
    "SGD",
    "AttentionGradOp",
    "AttentionOp",
    "Encoded",
    "EncodedLinearOp",
    "LinearOp",
    "OnePassRule",
    "TorchAttention",
    "TorchLinear",
    "TorchVocabLoss",
    "UpdateRule",
    "VocabLossOp",
]
