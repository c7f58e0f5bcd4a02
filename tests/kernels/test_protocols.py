"""The protocols of mcore-parallel are met here, without either package seeing the other."""

import inspect

import pytest

import mcore_kernels.protocols as ours
import mcore_parallel.protocols as theirs
from mcore_kernels import OPERATORS, Kernels

SHARED = [
    (
        "linear",
        theirs.LinearOp,
        ours.LinearOp,
        ("__call__", "forward", "input_grad", "weight_grad"),
    ),
    ("attention", theirs.AttentionGradOp, ours.AttentionOp, ("__call__", "backward")),
    (
        "cross_entropy",
        theirs.VocabLossOp,
        ours.VocabLossOp,
        ("local_max", "partials", "backward", "gradient"),
    ),
]


@pytest.mark.parametrize(
    ("op", "wanted", "stated", "methods"), SHARED, ids=[op for op, *_ in SHARED]
)
def test_signatures_agree(op: str, wanted: type, stated: type, methods: tuple[str, ...]) -> None:
    public = {name for name in vars(wanted) if not name.startswith("_")}
    assert public <= {*methods, "amax_reduce"}, "the protocol has grown"
    for method in methods:
        signature = inspect.signature(getattr(wanted, method))
        assert inspect.signature(getattr(stated, method)) == signature
        for implementation in OPERATORS[op].implementations:
            found = inspect.signature(getattr(type(implementation.load()), method))
            assert found == signature, (implementation.name, method)


def test_the_resolved_operators_have_the_attributes() -> None:
    kernels = Kernels()
    assert kernels.linear.amax_reduce is None
    for op, _, _, methods in SHARED:
        for method in methods:
            assert callable(getattr(getattr(kernels, op), method))
