"""Operators around a model, optimizer and sampling: what they are compared on, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.testing.case import Case, Make, scattered, slice_of_rows, with_nan
from mcore_kernels.testing.compare import assert_close

_STATE = ("value", "exp_avg", "exp_avg_sq")


def adam(make: Make) -> Iterator[Case]:
    """Cases of Adam."""

    def case(name: str, size: int, *, scale: float = 1.0, **more: Any) -> Case:
        grad = more.pop("grad", None)
        options = {
            "lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.1, "step": 3,
        }  # fmt: skip
        arguments = {
            "value": make(size),
            "grad": make(size, scale=scale) if grad is None else grad,
            "exp_avg": make(size, scale=0.1),
            "exp_avg_sq": make(size).square(),
            "state": "float32",
            "copy": False,
        }
        return Case(
            name=name, arguments={**arguments, **options, **more}, grads=(),
            fixed=(*_STATE, "grad_scale", "skip"),
        )  # fmt: skip

    yield case("plain", 40)
    yield case("one step", 33, step=1)
    yield case("late step, coupled decay", 300, step=1000, decoupled=False)
    yield case("bfloat16 moments and copy", 257, state="bfloat16", copy=True)
    yield case("no decay", 7, weight_decay=0.0)
    yield case("unscaled", 40, scale=64.0, grad_scale=torch.tensor(1 / 64, dtype=torch.float64))
    yield case("skipped", 40, skip=torch.tensor(2.0, dtype=torch.float64), copy=True)
    yield case("not skipped", 40, skip=torch.tensor(0.0, dtype=torch.float64))
    yield case("large values", 20, scale=1e3)
    yield case("scattered gradient of one element", 1)
    yield case("no rows", 0, copy=True)
    yield case("NaN", 12, grad=with_nan(make(12)))
    yield case("NaN, skipped", 12, grad=with_nan(make(12)), skip=torch.tensor(1.0).double())


def compare_adam(op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str) -> None:
    """Value, moments and copy after a step, with the formula's."""
    given = dict(arguments)
    copy = torch.full_like(given["value"], 7.0, dtype=torch.bfloat16) if given["copy"] else None
    moments = torch.bfloat16 if given.pop("state") == "bfloat16" else given["value"].dtype
    for name in ("exp_avg", "exp_avg_sq"):
        given[name] = given[name].to(moments)
        wide[name] = given[name].double()
    for name in _STATE:
        given[name] = given[name].clone()
    op(**{**given, "copy": copy})
    expected = _adam_formula(wide)
    for name, value in zip(_STATE, expected, strict=True):
        dtype = given[name].dtype
        assert_close(given[name], value, dtype=dtype, slack=4.0, label=f"{label}: {name}")
    if copy is not None:
        value = given["value"].double()
        assert_close(copy, value, dtype=torch.bfloat16, label=f"{label}: copy")


def _adam_formula(of: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    value, mean, square = (of[name] for name in _STATE)
    if float(of.get("skip", 0.0)):
        return value, mean, square
    decoupled, decay = of.get("decoupled", True), of["weight_decay"]
    grad = of["grad"] * of.get("grad_scale", 1.0) + (0.0 if decoupled else decay) * value
    mean = of["beta1"] * mean + (1 - of["beta1"]) * grad
    square = of["beta2"] * square + (1 - of["beta2"]) * grad**2
    m = mean / (1 - of["beta1"] ** of["step"])
    v = square / (1 - of["beta2"] ** of["step"])
    kept = value * (1 - of["lr"] * decay) if decoupled else value
    return kept - of["lr"] * m / (v.sqrt() + of["eps"]), mean, square


def grad_stats(make: Make) -> Iterator[Case]:
    """Cases of the norm of gradients."""

    def case(name: str, *tensors: Tensor) -> Case:
        named = {f"tensor{i}": x for i, x in enumerate(tensors)}
        return Case(name=name, arguments=named, grads=())

    broken = make(300)
    broken[::7] = torch.nan
    broken[1::7] = torch.inf
    broken[2::7] = -torch.inf
    yield case("plain", make(40), make(3, 5))
    yield case("odd sizes", make(700), make(1), make(13, 3))
    yield case("one", make(257))
    yield case("scattered", scattered(make(4, 9)), slice_of_rows(make(3, 8)))
    yield case("large values", make(30, scale=1e3))
    yield case("no rows", make(0, 4))
    yield case("some without elements", make(0), make(9), make(0))
    yield case("NaN", with_nan(make(12)), make(3))
    yield case("infinities", broken)


def compare_grad_stats(
    op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str
) -> None:
    """Both numbers, exactly where they are counts."""
    result = op(list(arguments.values()))
    finite = [x[x.isfinite()] for x in wide.values()]
    total = sum(float(x.square().sum()) for x in finite)
    count = sum(x.numel() - y.numel() for x, y in zip(wide.values(), finite, strict=True))
    first = next(iter(arguments.values()))
    dtype = torch.promote_types(first.dtype, torch.float32)
    expected = torch.tensor([total], dtype=torch.float64, device=first.device)
    assert_close(result[:1], expected, dtype=dtype, slack=4.0, label=f"{label}: squares")
    assert int(result[1]) == count, f"{label}: {int(result[1])} not finite, expected {count}"


def sample(make: Make) -> Iterator[Case]:
    """Cases of sampling."""

    def case(name: str, logits: Tensor, *, heat: float = 1.0, **cuts: Any) -> Case:
        rows = logits.shape[0]
        arguments = {
            "logits": logits,
            "uniform": make(rows).mul(0.9).abs().frac(),
            "temperature": torch.full((rows,), heat, dtype=torch.float64),
            **cuts,
        }
        return Case(
            name=name, arguments=arguments, grads=(),
            fixed=("uniform", "temperature", "top_p", "min_p"),
        )  # fmt: skip

    def column(*values: float) -> Tensor:
        whole = all(isinstance(value, int) for value in values)
        return torch.tensor(values, dtype=torch.int64 if whole else torch.float64)

    tied = make(4, 9).mul(0.7).round()
    yield case("plain", make(6, 31))
    yield case("warm", make(5, 13), heat=3.5)
    yield case("cold", make(5, 13), heat=0.0)
    yield case("cold, equal logits", tied, heat=0.0, top_k=column(0, 1, 2, 3))
    yield case("nearly cold", make(5, 13), heat=1e-30)
    yield case("top k", make(5, 13), top_k=column(0, 1, 2, 5, 99))
    yield case("top p", make(5, 13), top_p=column(1.0, 0.9, 0.5, 0.1, 1e-9))
    yield case("min p", make(4, 13), min_p=column(0.0, 0.1, 0.5, 1.0))
    cuts = {"top_k": column(5, 3, 0, 9), "top_p": column(0.9, 0.7, 0.6, 1.0)}
    yield case("all cuts", make(4, 12), heat=0.7, **cuts, min_p=column(0.1, 0.0, 0.3, 0.05))
    yield case("equal logits", tied, top_k=column(1, 2, 3, 4), top_p=column(0.5, 1.0, 0.9, 0.3))
    yield case("one entry", make(3, 1))
    yield case("no rows", make(0, 7), top_k=torch.zeros(0, dtype=torch.int64))
    yield case("scattered", scattered(make(3, 11)), top_k=column(3, 4, 5))
    yield case("large values", make(3, 11, scale=1e3), top_p=column(0.9, 0.5, 1.0))
    ruled_out = make(3, 8)
    ruled_out[:, 1:7] = -torch.inf
    yield case("entries ruled out", ruled_out, top_k=column(1, 5, 0))
    yield case("NaN", with_nan(make(3, 8)))


def compare_sample(op: Any, arguments: dict[str, Any], wide: dict[str, Any], label: str) -> None:
    """The tokens and their log-probabilities, with those of a walk over the entries."""
    tokens, logprobs = op(**arguments)
    assert tokens.dtype == torch.int64, f"{label}: tokens in {tokens.dtype}"
    assert logprobs.dtype == torch.float32, f"{label}: log-probabilities in {logprobs.dtype}"
    for row in range(wide["logits"].shape[0]):
        options = {
            name: value[row].item() for name, value in wide.items() if name not in ("logits",)
        }
        token, p = _sample_walk(wide["logits"][row].tolist(), **options)
        assert int(tokens[row]) == token, f"{label}: row {row}: {int(tokens[row])} for {token}"
        found, expected = float(logprobs[row]), math.nan if token < 0 else math.log(p)
        close = math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)
        assert close or (math.isnan(found) and token < 0), f"{label}: ln p {found} for {expected}"


def _sample_walk(
    z: list[float],
    *,
    uniform: float,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[int, float]:
    if any(math.isnan(x) for x in z) or max(z) == -math.inf:
        return -1, math.nan
    ids = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if temperature == 0:
        return ids[0], 1.0
    p = {i: math.exp((z[i] - z[ids[0]]) / temperature) for i in ids}
    ids = ids[: top_k or len(ids)]
    total = sum(p[i] for i in ids)
    kept: list[int] = []
    before = 0.0
    for i in ids:
        if kept and top_p < 1 and before >= top_p - 1e-6 * (1 - top_p):
            break
        kept.append(i)
        before += p[i] / total
    kept = [i for i in kept if p[i] >= min_p * p[ids[0]]]
    total, reached = sum(p[i] for i in kept), 0.0
    for i in sorted(kept):
        reached += p[i] / total
        if reached > uniform:
            return i, p[i] / total
    return max(kept), p[max(kept)] / total
