"""The protocols of mcore-parallel are met here, without either package seeing the other."""

import inspect
from importlib.util import find_spec

import pytest

import mcore_kernels.protocols as ours
import mcore_parallel.protocols as theirs
from mcore_kernels import OPERATORS, Kernels
from mcore_parallel.expert import GroupedLinearOp

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
        own = inspect.signature(getattr(stated, method))
        assert _without_more_options(own, signature) == signature
        for implementation in OPERATORS[op].implementations:
            if implementation.name == "flash4" and find_spec("flash_attn") is None:
                continue
            found = inspect.signature(getattr(type(implementation.load()), method))
            assert found == own, (implementation.name, method)


def _without_more_options(own: inspect.Signature, wanted: inspect.Signature) -> inspect.Signature:
    """`own` less the keywords with a default that only it has."""
    kept = [
        one
        for name, one in own.parameters.items()
        if name in wanted.parameters
        or one.kind is not inspect.Parameter.KEYWORD_ONLY
        or one.default is inspect.Parameter.empty
    ]
    return own.replace(parameters=kept)


def test_the_resolved_operators_have_the_attributes() -> None:
    kernels = Kernels()
    assert kernels.linear.amax_reduce is None
    for op, _, _, methods in SHARED:
        for method in methods:
            assert callable(getattr(getattr(kernels, op), method))


def test_products_of_experts_take_what_the_layers_give() -> None:
    """Counts may be a tensor too, here; the rest is one to one."""
    stated = (
        ours.GroupedLinearOp,
        *(type(one.load()) for one in OPERATORS["grouped_linear"].implementations),
    )
    for method in ("forward", "input_grad", "weight_grad"):
        wanted = list(inspect.signature(getattr(GroupedLinearOp, method)).parameters)
        for one in stated:
            assert list(inspect.signature(getattr(one, method)).parameters) == wanted, one
