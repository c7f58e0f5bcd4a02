"""Choosing: by priority, by name, by import path; refusing with a reason; copying by name."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from mcore_kernels import OPERATORS, Implementation, Operator, Target, explain, resolve
from mcore_kernels.registry import Resolved

CPU = Target()
H200 = Target(device_type="cuda", arch=(9, 0), dtype=torch.bfloat16, head_dim=128)


def double(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up * 2


def small_only(gate_up: torch.Tensor) -> str | None:
    return None if gate_up.numel() <= 4 else f"{gate_up.numel()} elements, at most 4"


MINE = Implementation(op="swiglu", name="mine", fn=double)
STRICT = Implementation(op="swiglu", name="strict", fn=double, limits=small_only)
YIELDING = Implementation(
    op="swiglu", name="yielding", fn=double, limits=small_only, second="reference"
)
NEVER = Implementation(
    op="swiglu",
    name="never",
    fn=double,
    requires=(lambda _: "wants the moon", lambda _: "and Mars"),
)


def path(name: str) -> str:
    return f"{__name__}:{name}"


def test_the_highest_priority_that_can_run_is_chosen() -> None:
    assert resolve("attention", target=CPU).name == "sdpa"
    assert resolve("attention", target=H200).name == "cudnn"
    ampere = Target(device_type="cuda", arch=(8, 0), dtype=torch.bfloat16, head_dim=128)
    assert resolve("attention", target=ampere).name == "flash"
    old = Target(device_type="cuda", arch=(7, 0), dtype=torch.float16, head_dim=128)
    assert resolve("attention", target=old).name == "reference"
    wide = Target(device_type="cuda", arch=(9, 0), dtype=torch.bfloat16, head_dim=512)
    assert resolve("attention", target=wide).name == "reference"
    assert resolve("attention", target=replace(wide, dtype=torch.float32)).name == "reference"
    assert resolve("attention", target=replace(wide, head_dim=576)).name == "reference"


def test_the_reason_names_what_was_passed_over() -> None:
    resolved = resolve("attention", target=CPU)
    assert "flash: needs cuda, the target is cpu" in resolved.reason
    assert repr(resolved).startswith("<attention: sdpa (")


def test_asking_for_one_that_cannot_run_says_why_and_what_can() -> None:
    with pytest.raises(ValueError) as error:
        resolve("rms_norm", target=CPU, require="triton")
    assert str(error.value) == (
        "rms_norm: 'triton' cannot run on cpu float32: needs a CUDA device, the target is cpu; "
        "available: eager, reference, invariant"
    )


def test_every_reason_is_given() -> None:
    with pytest.raises(ValueError, match="wants the moon; and Mars; available: "):
        resolve("swiglu", target=CPU, require=path("NEVER"))


@pytest.mark.parametrize(
    ("op", "require", "message"),
    [
        ("rmsnorm", None, "no operator 'rmsnorm'; did you mean 'rms_norm'?"),
        ("zzz", None, "no operator 'zzz'; there are linear, rms_norm, "),
        ("rms_norm", "trition", "rms_norm: no implementation 'trition'; did you mean 'triton'?"),
        ("rms_norm", "zzz", "rms_norm: no implementation 'zzz'; there are reference, "),
        ("rms_norm", "nowhere.at.all:X", "rms_norm: cannot import 'nowhere.at.all:X': No module"),
        ("rms_norm", "mcore_kernels:NOTHING", "rms_norm: cannot import 'mcore_kernels:NOTHING'"),
        ("rms_norm", "mcore_kernels:Target", "'mcore_kernels:Target' is no Implementation of rms"),
        ("rms_norm", path("MINE"), "is no Implementation of rms_norm"),
    ],
)
def test_names_that_nobody_has(op: str, require: str | None, message: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve(op, target=CPU, require=require)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_implementation_of_ones_own_by_import_path() -> None:
    resolved = resolve("swiglu", target=CPU, require=path("MINE"))
    assert resolved.name == "mine"
    assert resolved(torch.ones(2)).tolist() == [2.0, 2.0]


def test_dynamic_limits_raise_without_a_second_choice() -> None:
    resolved = resolve("swiglu", target=CPU, require=path("STRICT"))
    assert resolved(torch.ones(4)).tolist() == [2.0] * 4
    with pytest.raises(ValueError) as error:
        resolved(torch.ones(6))
    assert str(error.value) == "swiglu: 'strict' cannot serve this call: 6 elements, at most 4"


def test_dynamic_limits_turn_to_the_declared_second_choice() -> None:
    resolved = resolve("swiglu", target=CPU, require=path("YIELDING"))
    assert resolved(torch.ones(4)).tolist() == [2.0] * 4
    expected = resolve("swiglu", target=CPU, require="reference")(torch.ones(6))
    assert torch.equal(resolved(torch.ones(6)), expected)


def copies(resolved: Resolved) -> list[Resolved]:
    return [copy.copy(resolved), copy.deepcopy(resolved), pickle.loads(pickle.dumps(resolved))]


@pytest.mark.parametrize("require", [None, "reference", path("MINE"), path("YIELDING")])
def test_copies_are_bound_again_by_name(require: str | None) -> None:
    resolved = resolve("swiglu", target=CPU, require=require)
    x = torch.randn(2, 6)
    for one in copies(resolved):
        assert (one.op, one.name, one.target, one.reason) == (
            resolved.op,
            resolved.name,
            resolved.target,
            resolved.reason,
        )
        assert torch.equal(one(x), resolved(x))


def test_a_pickle_holds_names_and_no_code() -> None:
    assert b"reference" in pickle.dumps(resolve("swiglu", target=CPU))
    assert b"check_even" not in pickle.dumps(resolve("swiglu", target=CPU))


def test_unpickling_where_it_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(resolve("swiglu", target=CPU, require=path("MINE")))
    monkeypatch.setitem(globals(), "MINE", NEVER)
    with pytest.raises(ValueError, match="wants the moon"):
        pickle.loads(data)


def test_methods_are_reached_through_the_resolved_operator() -> None:
    linear = resolve("linear", target=CPU)
    out = linear.weight_grad(torch.ones(2, 3), torch.ones(2, 4))
    assert out.shape == (3, 4)
    assert linear.amax_reduce is None
    with pytest.raises(AttributeError):
        _ = linear.no_such_method


def test_nothing_is_looked_up_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve("swiglu", target=CPU)
    monkeypatch.setattr("mcore_kernels.registry.OPERATORS", {})
    assert resolved(torch.ones(2)).shape == (1,)


@pytest.mark.parametrize("target", [CPU, H200])
def test_explain_has_every_implementation_once_and_agrees_with_resolve(target: Target) -> None:
    rows = explain(target)
    names = [(row.op, row.name) for row in rows]
    assert sorted(names) == sorted(
        (one.op, one.name) for op in OPERATORS.values() for one in op.implementations
    )
    for op in OPERATORS:
        (chosen,) = [row for row in rows if row.op == op and row.status == "chosen"]
        assert resolve(op, target=CPU).name == chosen.name or target is H200
    for row in rows:
        refusal = OPERATORS[row.op].get(row.name).refusal(target)  # type: ignore[union-attr]
        assert (row.status == "refused") == (refusal is not None)
        assert row.reason
        assert refusal is None or row.reason == refusal


def test_explain_tells_of_second_choices() -> None:
    (row,) = [row for row in explain(H200) if (row.op, row.name) == ("rms_norm", "triton")]
    assert row.status == "chosen"
    assert "reference serves the arguments that it cannot" in row.reason


def test_the_reference_runs_everywhere() -> None:
    targets = [
        Target(device_type=device, dtype=dtype, head_dim=head_dim)
        for device in ("cpu", "cuda", "mps", "xpu")
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        for head_dim in (None, 1, 7, 1024)
    ]
    for operator in OPERATORS.values():
        reference = operator.get("reference")
        assert reference is not None
        assert all(reference.refusal(target) is None for target in targets)


def test_an_operator_needs_one_reference_and_distinct_names() -> None:
    reference = Implementation(op="x", name="reference", fn=double)
    with pytest.raises(AssertionError):
        Operator("x", ())
    with pytest.raises(AssertionError):
        Operator("x", (reference, reference))
    with pytest.raises(AssertionError):
        Operator("y", (reference,))


def test_second_choices_exist() -> None:
    for operator in OPERATORS.values():
        for one in operator.implementations:
            assert one.second is None or operator.get(one.second) is not None
            assert one.second is None or one.limits is not None
