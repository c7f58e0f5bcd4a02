"""The gated delta rule beyond conformance: chunks, documents, continuation, gradients, errors."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_kernels import Target, resolve

chunked = resolve("gated_delta_rule", target=Target())
recurrent = resolve("gated_delta_rule", target=Target(), require="reference")
BOTH = pytest.mark.parametrize("op", [chunked, recurrent], ids=["chunked", "recurrent"])
KEYS, HEADS, SIZE, VALUE = 2, 4, 5, 3
ROWS = ("q", "k", "v", "g", "beta")
NAMES = (*ROWS, "initial_states")


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def arguments(*lengths: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Everything there is, for documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    rows = sum(lengths)
    key = make(rows, KEYS, SIZE)
    return {
        "q": make(rows, KEYS, SIZE),
        "k": key / key.norm(dim=-1, keepdim=True),
        "v": make(rows, HEADS, VALUE),
        "g": -make(rows, HEADS).abs() / 4,
        "beta": make(rows, HEADS).sigmoid(),
        "initial_states": make(len(lengths), HEADS, SIZE, VALUE),
        "cu_seqlens": ends(*lengths),
        "max_seqlen": max(lengths),
    }


def widened(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }


def test_the_chunked_one_is_the_default() -> None:
    assert chunked.name == "chunked"


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 64])
@pytest.mark.parametrize("lengths", [(13,), (7, 7), (1, 9, 0, 4), (2, 2, 1)])
def test_chunks_and_recurrence_agree_in_values_and_gradients(
    lengths: tuple[int, ...], chunk_size: int
) -> None:
    """Whatever the length of the chunks: bounds of documents fall inside them and between."""
    found = []
    for op in (chunked, recurrent):
        given = arguments(*lengths, dtype=torch.float64)
        leaves = [given[name].requires_grad_() for name in NAMES]
        y, states = op(**given, chunk_size=chunk_size)
        (y.sin().sum() + states.cos().sum()).backward()
        found.append([y, states, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@BOTH
def test_gradients_in_double_precision(op: Any) -> None:
    given = arguments(3, 0, 4, dtype=torch.float64)
    leaves = [given.pop(name).requires_grad_() for name in NAMES]

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        return op(**dict(zip(NAMES, values, strict=True)), **given, scale=0.7, chunk_size=2)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("length", [1, 9])
def test_it_computes_what_transformers_does(length: int) -> None:
    """Their recurrence for a token, and their chunks, with a state before and after."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    given = arguments(length, length)
    theirs = {name: given[name].unflatten(0, (2, length)) for name in ROWS}
    theirs = {{"q": "query", "k": "key", "v": "value"}.get(n, n): x for n, x in theirs.items()}
    options = {"initial_state": given["initial_states"], "output_final_state": True}
    y, states = chunked(**given, chunk_size=4)
    for function in (module.torch_recurrent_gated_delta_rule, module.torch_chunk_gated_delta_rule):
        other, last = function(**theirs, **options)
        torch.testing.assert_close(y, other.flatten(0, 1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [4, 64])
def test_documents_do_not_see_each_other(chunk_size: int) -> None:
    """Changing a document changes no bit of the others; each is as if it were alone (U41).

    With chunks of 4 the bounds at 6 and 11 are inside chunks as those are counted over all tokens.
    """
    lengths = (6, 5, 8)
    given = arguments(*lengths)
    y, states = chunked(**given, chunk_size=chunk_size)
    for document, (start, stop) in enumerate(pairwise([0, 6, 11, 19])):
        other = arguments(*lengths, seed=1)
        mixed = {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}
        for name in ROWS:
            mixed[name][start:stop] = other[name][start:stop]
        mixed["initial_states"][document] = other["initial_states"][document]
        changed, changed_states = chunked(**mixed, chunk_size=chunk_size)
        outside = [n for n in range(19) if not start <= n < stop]
        assert torch.equal(changed[outside], y[outside])
        others = [n for n in range(3) if n != document]
        assert torch.equal(changed_states[others], states[others])
        assert not torch.equal(changed[start:stop], y[start:stop])
        alone_y, alone_state = chunked(
            **{name: given[name][start:stop] for name in ROWS},
            initial_states=given["initial_states"][document : document + 1],
            cu_seqlens=ends(stop - start),
            max_seqlen=stop - start,
            uniform=(1, stop - start),
            chunk_size=chunk_size,
        )
        torch.testing.assert_close(y[start:stop], alone_y)
        torch.testing.assert_close(states[document : document + 1], alone_state)


def test_gradients_do_not_cross_documents() -> None:
    given = arguments(6, 5)
    leaves = {name: given[name].requires_grad_() for name in ROWS}
    y, _ = chunked(**given, chunk_size=4)
    y[6:].square().sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert not leaf.grad[:6].any(), name
        assert leaf.grad[6:].any(), name


@BOTH
def test_a_document_in_pieces_is_the_whole(op: Any) -> None:
    """A prefill, then one token at a time beside another document that starts later."""
    given = arguments(9, 4)
    whole, last = op(**given, chunk_size=4)
    places = {0: list(range(9)), 1: list(range(9, 13))}
    out = torch.zeros_like(whole)
    states = given["initial_states"]
    for counts in ((5, 0), (1, 3), (1, 1), (2, 0)):
        rows = [places[n].pop(0) for n in (0, 1) for _ in range(counts[n])]
        out[rows], states = op(
            **{name: given[name][rows] for name in ROWS},
            initial_states=states,
            cu_seqlens=ends(*counts),
            max_seqlen=max(counts),
            chunk_size=4,
        )
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, last, rtol=1e-5, atol=1e-5)


def test_long_chunks_keep_their_digits() -> None:
    """The exponents of a chunk are differences of sums, here of sums around 1,000."""
    given = arguments(256)
    given["g"] = given["g"] * 20
    y, _ = chunked(**given, chunk_size=256)
    expected, _ = recurrent(**widened(given))
    assert (y - expected).norm() < 5e-7 * expected.norm()


def test_half_precision_is_rounded_once() -> None:
    given = arguments(9, 4)
    for name in ("q", "k", "v", "beta"):
        given[name] = given[name].bfloat16()
    y, states = chunked(**given, chunk_size=4)
    assert (y.dtype, states.dtype) == (torch.bfloat16, torch.float32)
    expected, expected_states = recurrent(**widened(given))
    torch.testing.assert_close(y, expected.bfloat16(), rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(states.double(), expected_states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"k": torch.ones(7, 2, 4)}, r"got \[7, 2, 5\] and \[7, 2, 4\]"),
        ({"q": torch.ones(7, 3, 5), "k": torch.ones(7, 3, 5)}, "divide .*, got 3 and 4"),
        ({"q": torch.ones(6, 2, 5), "k": torch.ones(6, 2, 5)}, "v has 7 rows, q and k have 6"),
        ({"g": torch.ones(7, 2)}, r"v has 7 rows of 4 heads, g is \[7, 2\]"),
        ({"beta": torch.ones(6, 4)}, r"v has 7 rows of 4 heads, beta is \[6, 4\]"),
        ({"initial_states": torch.ones(1, 4, 5, 3)}, r"states \[2, 4, 5, 3\], got \[1, 4, 5, 3\]"),
        ({"uniform": (2, 3)}, r"uniform=\(2, 3\) means 6 rows of 2 documents, got 7 rows of 2"),
    ],
)
@BOTH
def test_arguments_that_do_not_fit(op: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^gated_delta_rule: .*{message}"):
        op(**{**arguments(3, 4), **change})
