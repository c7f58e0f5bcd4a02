"""Scans over many chunks in Triton, beside plain torch: carried states, bounds, what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_kernels import Target, resolve

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def both(op: str, target: Target, arguments: dict[str, Any]) -> list[list[Tensor]]:
    """Results and gradients in Triton, and in plain torch."""
    found = []
    for name in ("triton", "chunked"):
        given = {
            key: value.to(target.device_type) if isinstance(value, Tensor) else value
            for key, value in arguments.items()
        }
        leaves = [
            value.requires_grad_()
            for value in given.values()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        y, states = resolve(op, target=target, require=name)(**given)
        grads = torch.autograd.grad(y.sin().sum() + states.cos().sum(), leaves)
        found.append([y, states, *grads])
    return found


def scan(*lengths: int, spare: int = 0, heads: int = 2, sizes: tuple[int, int] = (4, 6)) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = sum(lengths) + spare

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": made(rows, heads, sizes[0]),
        "dt": made(rows, heads) - 1,
        "a_log": made(heads),
        "b": made(rows, 1, sizes[1]),
        "c": made(rows, 1, sizes[1]),
        "d": made(heads),
        "dt_bias": made(heads),
        "initial_states": made(len(lengths), heads, *sizes),
        "cu_seqlens": ends(*lengths),
        "max_seqlen": max(lengths),
        "chunk_size": 16,
    }


def test_states_travel_from_chunk_to_chunk(target: Target) -> None:
    """Bounds of documents inside what would be chunks of all rows, and none of them shared."""
    for one, other in zip(*both("ssd_scan", target, scan(18, 0, 1, 33, spare=3)), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def delta(*lengths: int, spare: int = 0, value: int = 3) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = sum(lengths) + spare

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "q": made(rows, 1, 5),
        "k": torch.nn.functional.normalize(made(rows, 1, 5), dim=-1),
        "v": made(rows, 2, value),
        "g": -made(rows, 2).abs(),
        "beta": made(rows, 2).sigmoid(),
        "initial_states": made(len(lengths), 2, 5, value),
        "cu_seqlens": ends(*lengths),
        "max_seqlen": max(lengths),
        "chunk_size": 16,
    }


def test_corrections_travel_from_chunk_to_chunk(target: Target) -> None:
    """The delta rule over chunks of 16, beside other documents, from states and with key heads.

    Values are wider than what a kernel takes of them at a time.
    """
    arguments = delta(17, 0, 1, spare=2, value=19)
    for one, other in zip(*both("gated_delta_rule", target, arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_a_document_of_the_delta_rule_is_the_same_alone(target: Target) -> None:
    """Bit for bit, results and gradients (U41)."""
    op = resolve("gated_delta_rule", target=target, require="triton")
    packed, alone = delta(2, 17), delta(2, 17)
    rows = ("q", "k", "v", "g", "beta")
    for name in rows:
        alone[name] = alone[name][2:]
    alone |= {"initial_states": alone["initial_states"][1:], "cu_seqlens": ends(17)}
    found = []
    for given in (packed, alone):
        moved = {
            name: value.to(target.device_type) if isinstance(value, Tensor) else value
            for name, value in given.items()
        }
        leaves = [moved[name].requires_grad_() for name in rows]
        y, states = op(**moved)
        loss = y.square().sum() + states.square().sum()
        grads = torch.autograd.grad(loss, leaves)
        found.append([states[-1], *(one[-17:] for one in (y, *grads))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_document_does_not_depend_on_what_it_is_packed_with(target: Target) -> None:
    """Bit for bit, results and gradients (U41).

    Of equal steps: torch's softplus on CPUs rounds by where a number lies among its neighbours.
    """
    op = resolve("ssd_scan", target=target, require="triton")
    packed, alone = scan(5, 20), scan(5, 20)
    for name in ("x", "dt", "b", "c"):
        alone[name] = alone[name][5:]
    alone |= {
        "initial_states": alone["initial_states"][1:],
        "cu_seqlens": ends(20),
        "max_seqlen": 20,
    }
    found = []
    for given in (packed, alone):
        leaf = given["x"] = given["x"].to(target.device_type).requires_grad_()
        rest = {
            name: value.to(target.device_type) if isinstance(value, Tensor) else value
            for name, value in given.items()
            if name != "x"
        }
        y, states = op(leaf, **rest, dt_limits=(0.5, 0.5))
        (dx,) = torch.autograd.grad(y.square().sum() + states.square().sum(), leaf)
        found.append([y[-20:], states[-1], dx[-20:]])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_what_the_scan_refuses_goes_to_the_second(target: Target) -> None:
    given = {
        name: value.to(target.device_type) if isinstance(value, Tensor) else value
        for name, value in scan(5, sizes=(129, 2)).items()
    }
    for arguments in (given, {**given, "x": given["x"][..., :3].double(), "initial_states": None}):
        found, wanted = (
            resolve("ssd_scan", target=target, require=name)(**arguments)
            for name in ("triton", "chunked")
        )
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_the_scan_is_an_operator_of_torch(target: Target) -> None:
    """Schema, fake results and the registration of gradients hold (torch's own checker)."""
    op = resolve("ssd_scan", target=target, require="triton")
    given = {
        name: value.to(target.device_type) if isinstance(value, Tensor) else value
        for name, value in scan(7, 2).items()
    }
    op(**given)
    step = given["dt"].abs().requires_grad_()
    arguments = (
        given["x"].requires_grad_(), step, given["a_log"], given["b"], given["c"], None, None,
        given["cu_seqlens"], [16, 7],
    )  # fmt: skip
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.mcore_kernels.ssd_scan.default, arguments, test_utils=checks)


def test_the_delta_rule_is_an_operator_of_torch(target: Target) -> None:
    """Schema, fake results and the registration of gradients hold (torch's own checker)."""
    given = {
        name: value.to(target.device_type) if isinstance(value, Tensor) else value
        for name, value in delta(3, 2).items()
    }
    resolve("gated_delta_rule", target=target, require="triton")(**given)
    arguments = (
        given["q"].requires_grad_(), given["k"], given["v"].requires_grad_(), given["g"],
        given["beta"], None, given["cu_seqlens"], 0.5, [16, 3],
    )  # fmt: skip
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.mcore_kernels.gated_delta_rule.default
    torch.library.opcheck(operator, arguments, test_utils=checks)
