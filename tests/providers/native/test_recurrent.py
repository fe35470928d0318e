"""Recurrent kernels of every instruction set against NumPy, bit by bit for any cut, and their refusals."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernels import isas
from native_recurrent import Delta, Doubles, Floats, convolution, delta_rule, rounded, stored, tiled, untiled

QUIET = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LENGTHS = st.lists(st.sampled_from([0, 1, 1, 2, 5, 40]), min_size=1, max_size=4).filter(any)


def random_case(
    seed: int, tokens: int, places: int, heads: tuple[int, int], sizes: tuple[int, int], kind: str
) -> Delta:
    rng = np.random.default_rng(seed)
    (values, keys), (key_size, value_size) = heads, sizes

    def normal(*shape: int) -> Floats:
        return rng.normal(size=shape).astype(np.float32)

    query, key = normal(tokens, keys, key_size), normal(tokens, keys, key_size)
    for x in (query, key):
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
    decay = -np.abs(normal(tokens, values, *([key_size] if kind == "by key" else [])))
    beta = None if kind == "no beta" else rng.uniform(size=(tokens, values)).astype(np.float32)
    states = normal(places, values, key_size, value_size)
    return Delta(query, key, normal(tokens, values, value_size), decay, beta, states, key_size**-0.5)


def expected(case: Delta, lengths: list[int], places: list[int]) -> tuple[Doubles, Doubles]:
    """The recurrence of the docstring of ``LinearAttention`` of ONNX, token by token in float64."""
    shared = case.value.shape[1] // case.query.shape[1]
    query, key = (np.repeat(x, shared, axis=1).astype(np.float64) for x in (case.query, case.key))
    factors = np.exp(case.decay.astype(np.float64))
    factors = factors[..., None] if case.decay.ndim == 3 else factors[..., None, None]
    states, output = case.states.astype(np.float64), np.empty(case.value.shape)
    ends = np.cumsum([0, *lengths])
    for place, begin, end in zip(places, ends, ends[1:], strict=False):
        for t in range(begin, end):
            state = factors[t] * states[place]
            d = case.value[t].astype(np.float64)
            if case.beta is not None:
                d = case.beta[t][:, None] * (d - np.einsum("hkv,hk->hv", state, key[t]))
            states[place] = state + key[t][:, :, None] * d[:, None, :]
            output[t] = case.scale * np.einsum("hkv,hk->hv", states[place], query[t])
    return output, states


@QUIET
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=LENGTHS,
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    sizes=st.sampled_from([(1, 16), (8, 16), (20, 32), (128, 48)]),
    kind=st.sampled_from(["by head", "by key", "no beta"]),
)
def test_the_delta_rule_of_every_instruction_set_is_that_of_numpy_and_equal_in_bits(
    library: Path, seed: int, lengths: list[int], heads: tuple[int, int], sizes: tuple[int, int], kind: str
) -> None:
    places = np.random.default_rng(seed).permutation(len(lengths) + 2)[: len(lengths)].tolist()
    case = random_case(seed, sum(lengths), len(lengths) + 2, heads, sizes, kind)
    outputs = [delta_rule(library, isa, case, lengths, places) for isa in isas(library)]
    output, states = expected(case, lengths, places)
    np.testing.assert_allclose(outputs[0][0], output, rtol=0, atol=2e-5)
    np.testing.assert_allclose(untiled(outputs[0][1], *sizes), states, rtol=0, atol=2e-5)
    for other in outputs[1:]:
        np.testing.assert_array_equal(other[0], outputs[0][0])
        np.testing.assert_array_equal(other[1], outputs[0][1])


@QUIET
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.sampled_from([1, 2, 7, 40]),
    sizes=st.sampled_from([(1, 16), (8, 16), (20, 32), (128, 48)]),
    kind=st.sampled_from(["by head", "by key", "no beta"]),
)
def test_states_of_bfloat16_are_those_of_float32_rounded_after_each_pair_of_tokens(
    library: Path, seed: int, tokens: int, sizes: tuple[int, int], kind: str
) -> None:
    case = random_case(seed, tokens, 1, (4, 2), sizes, kind)
    case.states = rounded(case.states)
    halves = dataclasses.replace(case, bfloat16=True)
    results = [delta_rule(library, isa, halves, [tokens], [0]) for isa in isas(library)]
    content, outputs = case.states, []
    for begin in range(0, tokens, 2):
        pair = case.tokens(slice(begin, begin + 2))
        pair.states = content
        output, lines = delta_rule(library, isas(library)[0], pair, [len(pair.value)], [0])
        outputs.append(output)
        content = rounded(stored(lines, *sizes))
    for found, states in results:
        np.testing.assert_array_equal(found, np.concatenate(outputs))
        np.testing.assert_array_equal(stored(states, *sizes, bfloat16=True), content)
        np.testing.assert_array_equal(
            states[:, :, -lines.shape[2] + sizes[0] * sizes[1] // 16 :],
            lines[:, :, sizes[0] * sizes[1] // 16 :],
        )
        np.testing.assert_array_equal(states, results[0][1])


def test_what_is_no_number_stays_so_in_states_of_bfloat16(library: Path) -> None:
    case = random_case(1, 2, 1, (1, 1), (8, 16), "by head")
    case.bfloat16 = True
    case.value[0] = np.frombuffer(np.full(16, 0x7FFFFFFF, np.uint32), np.float32)
    case.value[1] = np.inf
    for isa in isas(library):
        _, states = delta_rule(library, isa, case, [2], [0])
        assert np.isnan(stored(states, 8, 16, bfloat16=True)).all()


@QUIET
@given(
    seed=st.integers(0, 2**32 - 1),
    cuts=st.lists(st.integers(0, 71), max_size=5),
    kind=st.sampled_from(["by head", "by key", "no beta"]),
    bfloat16=st.booleans(),
)
def test_the_delta_rule_has_the_same_bits_for_any_cut_and_any_neighbours(
    library: Path, seed: int, cuts: list[int], kind: str, bfloat16: bool
) -> None:
    case = random_case(seed, 71, 3, (4, 2), (24, 32), kind)
    case.bfloat16 = bfloat16
    isa = isas(library)[0]
    whole, states = delta_rule(library, isa, case, [71], [1])
    pieces, last = [], case.states
    for begin, end in pairwise(sorted({0, 71, *cuts})):
        part = case.tokens(slice(begin, end))
        part.states = last
        piece, last = delta_rule(library, isa, part, [end - begin], [1])
        pieces.append(piece)
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(last, states)
    beside, states = delta_rule(library, isa, case, [12, 59], [2, 0])
    alone = case.tokens(slice(12, 71))
    np.testing.assert_array_equal(beside[12:], delta_rule(library, isa, alone, [59], [0])[0])
    np.testing.assert_array_equal(states[1], tiled(case.states, bfloat16=bfloat16)[1])


def expected_convolution(
    x: Floats, weights: Floats, bias: Floats | None, state: Floats, *, silu: bool
) -> tuple[Doubles, Floats]:
    taps = len(weights)
    inputs = np.concatenate([state, x])
    y = np.stack([(weights.astype(np.float64) * inputs[t : t + taps]).sum(axis=0) for t in range(len(x))])
    y += 0.0 if bias is None else bias
    return y / (1 + np.exp(-y)) if silu else y, inputs[len(inputs) - taps + 1 :]


@QUIET
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=LENGTHS,
    channels=st.sampled_from([1, 16, 40, 300]),
    taps=st.sampled_from([1, 2, 4, 7]),
    bias=st.booleans(),
    silu=st.booleans(),
)
def test_convolutions_are_those_of_numpy_and_equal_in_bits_for_any_cut(
    library: Path, seed: int, lengths: list[int], channels: int, taps: int, bias: bool, silu: bool
) -> None:
    rng = np.random.default_rng(seed)
    x, weights = (rng.normal(size=(n, channels)).astype(np.float32) for n in (sum(lengths), taps))
    offset = rng.normal(size=channels).astype(np.float32) if bias else None
    states = rng.normal(size=(len(lengths) + 1, taps - 1, channels)).astype(np.float32)
    places = rng.permutation(len(lengths) + 1)[: len(lengths)].tolist()
    results = [
        convolution(library, isa, x, weights, offset, states, lengths, places, silu=silu)
        for isa in isas(library)
    ]
    found, after = results[0]
    ends = np.cumsum([0, *lengths])
    for place, begin, end in zip(places, ends, ends[1:], strict=False):
        if begin == end:
            continue
        right, state = expected_convolution(x[begin:end], weights, offset, states[place], silu=silu)
        np.testing.assert_allclose(found[begin:end], right, rtol=0, atol=5e-6)
        np.testing.assert_array_equal(after[place], state)
        last = states
        for t in range(begin, end):  # token by token
            y, last = convolution(
                library, isas(library)[0], x[t : t + 1], weights, offset, last, [1], [place], silu=silu
            )
            np.testing.assert_array_equal(y[0], found[t])
    for other in results[1:]:
        np.testing.assert_array_equal(other[0], found)
        np.testing.assert_array_equal(other[1], after)


@pytest.mark.parametrize(
    ("lengths", "places", "message"),
    [
        ([3, 3], [1, 1], "two rows name one state"),
        ([6], [3], "a row names a state that does not exist"),
        ([6], [-1], "a row names a state that does not exist"),
        ([5], [0], "the rows do not begin and end with the tokens"),
        ([8, -2], [0, 1], "the rows are not in order"),
    ],
)
def test_rows_that_are_wrong_are_refused(
    library: Path, lengths: list[int], places: list[int], message: str
) -> None:
    case = random_case(0, 6, 3, (2, 1), (8, 16), "by head")
    with pytest.raises(ValueError, match=message):
        delta_rule(library, isas(library)[0], case, lengths, places)
    x, weights = np.zeros((6, 4), np.float32), np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=message):
        convolution(
            library, "portable", x, weights, None, np.zeros((3, 1, 4), np.float32), lengths, places, silu=True
        )


def test_sizes_that_are_wrong_are_refused(library: Path) -> None:
    case = random_case(0, 2, 1, (3, 2), (8, 16), "by head")
    with pytest.raises(ValueError, match="the heads are no multiple of those of keys"):
        delta_rule(library, "portable", case, [2], [0])
