"""A chain equals its operators bit by bit, for any rows, cut into tasks and threads; norms equal NumPy."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from half_weight import HalfWeight
from native_kernels import isas
from operator_calls import ALONE, MAKERS, attention_attributes, attention_inputs, linear_attributes
from operator_host import Call, OperatorHost, RefusedError, build_host
from paged_attention_reference import BFLOAT16, BYTE_QUERIES, FLOAT32, INT8, random_case
from quantized_linear_reference import Weight, grouped_weight, random_weight

from carryall.graph_opt.lower.attention.near_products import in_lanes
from carryall.graph_opt.lower.chain.program import (
    ABSENT,
    ACTIVATE,
    ADD,
    ATTENTION,
    CENTER,
    GATE,
    LINEAR,
    MULTIPLY,
    NEAR_ATTENTION,
    NORM,
    PART,
    VERSION,
    float_bits,
)
from carryall.graph_opt.lower.chain.steps import ATTENTION_SIZES
from carryall.graph_opt.lower.products.tiles import LAYOUT
from carryall.providers.native.compiler import find_compiler

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
HIDDEN, INNER = 96, 50


@pytest.fixture(scope="module")
def host_program(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sys.platform == "win32":
        pytest.skip("the host loads libraries as POSIX does")
    try:
        return build_host(find_compiler() or [], tmp_path_factory.mktemp("host") / "host")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the compiler fails: {error.stderr.splitlines()[-1]}")


@pytest.fixture
def host(host_program: Path, library: Path) -> Iterator[OperatorHost]:
    with OperatorHost([str(host_program), str(library)]) as opened:
        yield opened


def program(widths: list[int], outputs: int, steps: list[tuple[int, ...]]) -> npt.NDArray[np.int64]:
    header = [VERSION, LAYOUT, 2, 0, len(widths), outputs, len(steps), *widths]
    return np.array([*header, *(number for step in steps for number in step)], np.int64)


AnyWeight = Weight | HalfWeight


def facts(weight: AnyWeight) -> tuple[int, ...]:
    return tuple(int(value) for name, value in linear_attributes(weight).items() if name != "layout")


def mlp(
    rng: np.random.Generator, hidden: int = HIDDEN, inner: int = INNER, *, halves: tuple[int, ...] = ()
) -> tuple[list[AnyWeight], npt.NDArray[np.int64], list[npt.NDArray[np.generic]]]:
    """Return weights, program and inputs behind x of two products of x, a sum and a gated MLP.

    Weights with the numbers ``halves`` are floats of 16 bits.
    """
    weights: list[AnyWeight] = [
        grouped_weight(rng, hidden, hidden, 32, 64, 1),
        random_weight(rng, hidden, hidden, 8, 64, 0),
        random_weight(rng, 2 * inner, hidden, 4, 32, 2),
        random_weight(rng, hidden, inner, 8, 128, 0),
    ]
    for number in halves:
        size = weights[number].inputs, weights[number].outputs
        values = rng.standard_normal(size).astype(np.float16).astype(np.float32)
        weights[number] = HalfWeight(values, ir.DataType.FLOAT16)
    bias = rng.standard_normal(hidden).astype(np.float32)
    steps = [
        (LINEAR, -2, 0, 1, ABSENT, *facts(weights[0])),
        (LINEAR, -3, 0, 2, 5, *facts(weights[1])),
        (ADD, -1, -2, -3, 5),
        (LINEAR, -4, -1, 3, ABSENT, *facts(weights[2])),
        (GATE, -5, -4),
        (LINEAR, -2, -5, 4, ABSENT, *facts(weights[3])),
        (ADD, -1, -1, -2, ABSENT),
    ]
    numbers = program([hidden, hidden, hidden, 2 * inner, inner], 1, steps)
    return weights, numbers, [*(weight.tiles() for weight in weights), bias]


# Rows of registers of 1,024 floats are not side by side.
@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "hidden", "inner"),
    [*((rows, HIDDEN, INNER) for rows in (1, 2, 7, 40, 300)), (1, 1024, 512), (40, 1024, 512)],
)
@pytest.mark.parametrize("halves", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_a_chain_equals_its_operators_bit_by_bit(
    host: OperatorHost, rows: int, hidden: int, inner: int, halves: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(rows)
    weights, numbers, inputs = mlp(rng, hidden, inner, halves=halves)
    bias = np.asarray(inputs[-1])
    x = rng.standard_normal((rows, hidden)).astype(np.float32)

    def product(index: int, of: Floats, added: Floats | None = None) -> Floats:
        operands = [of, np.asarray(inputs[index]), added]
        return host.run(Call("QuantizedLinear", linear_attributes(weights[index]), operands))

    total = (product(0, x) + product(1, x, bias)) + bias
    expected = total + product(3, host.run(Call("SiluAndMul", {}, [product(2, total)])))
    for threads in (1, 2, 5, 16):  # more than there are cores, so that some sleep
        found = host.run(Call("Chain", ALONE, [numbers, x, *inputs], threads=threads, copies=2))
        np.testing.assert_array_equal(found, expected)
    last = host.run(Call("Chain", ALONE, [numbers, x[-1:], *inputs], threads=2))
    np.testing.assert_array_equal(last, expected[-1:])


def test_instruction_sets_give_equal_norms_near_numpy(host_program: Path, library: Path) -> None:
    rng, found = np.random.default_rng(0), []
    x = (rng.standard_normal((9, 3, 105)) * 50).astype(np.float32)
    scale = rng.standard_normal(105).astype(np.float32)
    steps = [(PART, -2, 0, 105), (NORM, -1, -2, 1, float_bits(1e-2))]
    numbers = program([210, -210], 1, steps)
    exact = x[:, 1:].astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(axis=2, keepdims=True) + np.float32(1e-2)) * scale
    for isa in isas(library):
        with OperatorHost([str(host_program), str(library)], {"CARRYALL_KERNELS_ISA": isa}) as opened:
            found.append(opened.run(Call("Chain", ALONE, [numbers, x.reshape(9, 315), scale], threads=2)))
        np.testing.assert_allclose(found[-1], expected.reshape(9, 210), rtol=4e-7)
        np.testing.assert_array_equal(found[-1], found[0])


def gelu(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))


FUNCTIONS: list[tuple[int, Callable[[Any], Any]]] = [
    (0, gelu),
    (1, lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    (2, lambda x: x / (1 + np.exp(-x))),
    (3, lambda x: np.maximum(x, 0)),
    (4, lambda x: x / (1 + np.exp(-1.702 * x))),
]


@pytest.mark.parametrize("width", [1, 16, 105, 384])
@pytest.mark.parametrize("biased", [False, True])
def test_instruction_sets_give_equal_norms_with_a_mean_near_numpy(
    host_program: Path, library: Path, width: int, biased: bool
) -> None:
    rng, found = np.random.default_rng(width), []
    x = (rng.standard_normal((7, width)) * 3 + 5).astype(np.float32)
    scale, bias = rng.standard_normal((2, width)).astype(np.float32)
    numbers = program([width], 1, [(CENTER, -1, 0, 1, 2 if biased else ABSENT, float_bits(1e-3))])
    exact = x.astype(np.float64)
    exact = exact - exact.mean(axis=1, keepdims=True)
    expected = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-3) * scale + bias * biased
    for isa in isas(library):
        with OperatorHost([str(host_program), str(library)], {"CARRYALL_KERNELS_ISA": isa}) as opened:
            found.append(opened.run(Call("Chain", ALONE, [numbers, x, scale, bias], threads=2)))
        np.testing.assert_allclose(found[-1], expected, rtol=0, atol=5e-6)
        np.testing.assert_array_equal(found[-1], found[0])


@pytest.mark.parametrize(("function", "oracle"), FUNCTIONS)
def test_instruction_sets_give_equal_activations_near_numpy(
    host_program: Path, library: Path, function: int, oracle: Callable[[Any], Any]
) -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [-1e4, -80, 80, 1e4, np.nan]]).astype(np.float32)[None]
    numbers, found = program([x.size], 1, [(ACTIVATE, -1, 0, function)]), []
    with np.errstate(over="ignore"):
        expected = oracle(x.astype(np.float64))
    for isa in isas(library):
        with OperatorHost([str(host_program), str(library)], {"CARRYALL_KERNELS_ISA": isa}) as opened:
            found.append(opened.run(Call("Chain", ALONE, [numbers, x])))
        np.testing.assert_allclose(found[-1], expected, rtol=5e-7, atol=1.2e-6)
        np.testing.assert_array_equal(found[-1], found[0])


def test_factors_of_rows_are_multiplied(host: OperatorHost) -> None:
    x, other = np.random.default_rng(0).standard_normal((2, 5, 37)).astype(np.float32)
    numbers = program([37], 1, [(MULTIPLY, -1, 0, 1)])
    np.testing.assert_array_equal(host.run(Call("Chain", ALONE, [numbers, x, other], threads=2)), x * other)


def test_leading_axes_are_those_of_the_first_rows(host: OperatorHost) -> None:
    scale, x = np.ones(4, np.float32), np.ones((3, 1, 4), np.float32)
    numbers = program([4], 1, [(NORM, -1, 0, 1, 0)])
    assert host.run(Call("Chain", ALONE, [numbers, x, scale])).shape == (3, 1, 4)
    assert host.run(Call("Chain", ALONE, [numbers, x[:0], scale])).shape == (0, 1, 4)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(NORM, -1, -2, 1, 0)], "reads no rows"),
        ([(NORM, -1, 5, 1, 0)], "reads no rows"),
        ([(NORM, -9, 0, 1, 0)], "no register for its result"),
        ([(PART, -1, 0, 0)], "a wrong kind of register"),
        ([(PART, -3, 0, 3), (NORM, -1, 0, 1, 0)], "not within its rows"),
        ([(GATE, -1, 0)], "another width"),
        ([(NORM, -1, 0, 0, 0)], "the weight of a norm"),
        ([(CENTER, -1, 0, 0, ABSENT, 0)], "weight or bias of another width"),
        ([(CENTER, -1, 0, 1, 0, 0)], "weight or bias of another width"),
        ([(ACTIVATE, -1, 0, 5)], "unknown activation function"),
        ([(MULTIPLY, -1, 0, 1)], "factors of a product of rows"),
        ([(NORM, -2, 0, 1, 0)], "writes an output"),
        ([(NORM, -1, 0, 1, 0, 7)], "goes on behind its last step"),
        ([(NORM, -1, 0, 1)], "ends within a step"),
        ([(77, -1, 0)], "unknown step"),
    ],
)
def test_wrong_programs_are_refused(host: OperatorHost, steps: list[tuple[int, ...]], message: str) -> None:
    scale, x = np.ones(4, np.float32), np.ones((3, 4), np.float32)
    with pytest.raises(RefusedError, match=message):
        host.run(Call("Chain", ALONE, [program([4, 4, -2], 1, steps), x, scale]))


def test_another_version_is_refused_with_both(host: OperatorHost) -> None:
    call = MAKERS["chain"](np.random.default_rng(0)).call
    numbers = np.array(call.inputs[0])
    numbers[0] = 9
    with pytest.raises(RefusedError, match=r"layout version 9, .* these kernels read versions 5, 2, 2"):
        host.run(Call("Chain", ALONE, [numbers, *call.inputs[1:]]))


@pytest.mark.parametrize("cache", [FLOAT32, BFLOAT16, INT8, BYTE_QUERIES])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [40, 3], [300]])
@pytest.mark.parametrize("ahead", [False, True])
def test_attention_in_a_chain_equals_the_operator(
    host: OperatorHost, cache: int, lengths: list[int], ahead: bool
) -> None:
    rng = np.random.default_rng(cache)
    options: dict[str, Any] = {"past": [0] * len(lengths), "rotary": 64, "cache": cache, "block": 32}
    case = random_case(rng, heads=(9, 3), size=64, lengths=lengths, slopes=not ahead, ahead=ahead, **options)
    inputs = attention_inputs(case, rng)
    attributes = attention_attributes(case)
    expected = host.run(Call("PagedAttention", attributes, inputs))
    packed = np.concatenate([np.asarray(part) for part in inputs[:3]], axis=1)
    sizes = [int(attributes[name]) for name in ATTENTION_SIZES]
    floats = [float_bits(float(attributes[name])) for name in ("scale", "softcap")]
    places = [*range(1, 9), ABSENT, *([ABSENT, 9] if ahead else [9, ABSENT])]
    whole = [(ATTENTION, -1, 0, ABSENT, ABSENT, *places, *sizes, *floats, 0)]
    parts = [(PART, -2, 0, 0), (PART, -3, 0, 576), (PART, -4, 0, 768)]
    cut = [*parts, (ATTENTION, -1, -2, -3, -4, *places, *sizes, *floats, 0)]
    for numbers in (program([576], 1, whole), program([576, -576, -192, -192], 1, cut)):
        for threads in (1, 2, 4):
            operands = [numbers, packed, *inputs[3:11], inputs[12 + ahead]]
            call = Call("Chain", ALONE, operands, threads=threads, copies=2)
            np.testing.assert_array_equal(host.run(call), expected)


class Texts:
    """Random texts of several lengths, one behind the other, and the operands of attention over them."""

    def __init__(self, seed: int) -> None:
        self.rng, self.heads, self.size, lengths = np.random.default_rng(seed), 2, 24, [3, 90, 1, 300]
        self.begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.x = self.rng.standard_normal((self.begins[-1], 3 * self.heads * self.size)).astype(np.float32)
        blocks = -(-np.array(lengths) // 32)
        table = (np.cumsum(blocks) - blocks)[:, None] + np.minimum(
            np.arange(blocks.max()), blocks[:, None] - 1
        )
        positions = np.arange(self.begins[-1]) - np.repeat(self.begins[:-1], lengths)
        ahead = (np.repeat(lengths, lengths) - 1 - positions).astype(np.int32)
        cache = np.zeros((blocks.sum(), self.heads, 32, 4 * 32), np.uint8)
        past = np.zeros(len(lengths), np.int32)
        self.inputs = [cache, cache.copy(), self.begins, past, table.astype(np.int32), ahead]

    def call(self, near: Sequence[int], *arrays: Floats, changed: int = -1) -> Call:
        """Return a chain of attention with these inputs behind the others; ``changed`` has past tokens."""
        inputs = [x.copy() for x in self.inputs]
        if changed >= 0:
            inputs[3][changed] = 1
        sizes = [self.heads, self.heads, self.size, 32, 0, 0, 0, 0]
        places = [1, 2, 3, 4, 5, *[ABSENT] * 5, 6, *near]
        floats = float_bits(self.size**-0.5), float_bits(0)
        step = (NEAR_ATTENTION, -1, 0, ABSENT, ABSENT, *places, *sizes, *floats, 0)
        numbers = program([self.heads * self.size], 1, [step])
        return Call("Chain", ALONE, [numbers, self.x, *inputs, *arrays], threads=2)

    def attention(self, added: Callable[[Array, Array, Array], Array]) -> Array:
        """Return the result; ``added`` to the scores is computed from queries, keys and distances."""
        expected = np.empty((self.begins[-1], self.heads * self.size))
        for begin, end in pairwise(self.begins):
            parts = self.x[begin:end].astype(np.float64).reshape(-1, 3, self.heads, self.size)
            q, k, v = parts.transpose(1, 2, 0, 3)
            distance = np.arange(end - begin) - np.arange(end - begin)[:, None]
            scores = q @ k.transpose(0, 2, 1) * self.size**-0.5 + added(q, k, distance)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            rows = weights / weights.sum(-1, keepdims=True) @ v
            expected[begin:end] = rows.transpose(1, 0, 2).reshape(end - begin, -1)
        return expected


def equal_on_every_instruction_set(library: Path, host: Path, call: Call) -> Floats:
    found: list[Floats] = []
    for isa in isas(library):
        with OperatorHost([str(host), str(library)], {"CARRYALL_KERNELS_ISA": isa}) as opened:
            found.append(np.asarray(opened.run(call)))
        np.testing.assert_array_equal(found[-1], found[0], isa)
    return found[0]


@pytest.mark.parametrize("reach", [1, 5, 200])
def test_biases_by_distance_are_added_to_scores(host_program: Path, library: Path, reach: int) -> None:
    texts = Texts(reach)
    near = (texts.rng.standard_normal((texts.heads, 2 * reach + 1)) * 2).astype(np.float32)
    call = texts.call([7, ABSENT, ABSENT], near)
    expected = texts.attention(lambda q, k, distance: near[:, np.clip(distance, -reach, reach) + reach])
    found = equal_on_every_instruction_set(library, host_program, call)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)
    wrong = texts.call([7, ABSENT, ABSENT], near[:, 1:])
    with OperatorHost([str(host_program), str(library)]) as opened, pytest.raises(RefusedError, match="near"):
        opened.run(wrong)


@pytest.mark.parametrize("reach", [3, 20, 299])
def test_products_by_distance_are_added_to_scores(host_program: Path, library: Path, reach: int) -> None:
    """Disentangled attention: queries by keys of distances, and keys by queries of distances."""
    texts = Texts(reach)
    shape = (2, texts.heads, 2 * reach + 1, texts.size)
    keys, queries = (texts.rng.standard_normal(shape) / 4).astype(np.float32)

    def added(q: Array, k: Array, distance: Array) -> Array:
        row = np.clip(distance, -reach, reach) + reach
        of_queries = np.einsum("hqd,hqkd->hqk", q, keys[:, row]) * texts.size**-0.5
        of_keys = np.einsum("hkd,hqkd->hqk", k, queries[:, row])
        return np.asarray(of_queries + of_keys)

    tables = [in_lanes(keys), in_lanes(queries)]
    found = equal_on_every_instruction_set(library, host_program, texts.call([ABSENT, 7, 8], *tables))
    np.testing.assert_allclose(found, texts.attention(added), rtol=0, atol=5e-6)
    near = np.zeros((texts.heads, 3), np.float32)
    wrong = {
        "near_keys or near_queries does not have": texts.call([ABSENT, 7, 8], tables[0], tables[1][:, :, 1:]),
        "near_keys or": texts.call([ABSENT, 7, ABSENT], tables[0]),
        "keys by distance need": texts.call([9, 7, 8], *tables, near),
        "those of new tokens only": texts.call([ABSENT, 7, 8], *tables, changed=1),
    }
    with OperatorHost([str(host_program), str(library)]) as opened:
        for message, call in wrong.items():
            with pytest.raises(RefusedError, match=message):
                opened.run(call)


@pytest.mark.parametrize("lengths", [[1, 1], [40, 3]])
def test_attention_writes_rows_that_are_not_side_by_side(host: OperatorHost, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    case = random_case(
        rng, heads=(16, 4), size=64, lengths=lengths, past=[0, 0], rotary=64, cache=INT8, block=32
    )
    inputs, attributes = attention_inputs(case, rng), attention_attributes(case)
    expected = host.run(Call("PagedAttention", attributes, inputs))
    packed = np.concatenate([np.asarray(part) for part in inputs[:3]], axis=1)
    sizes = [int(attributes[name]) for name in ATTENTION_SIZES]
    floats = [float_bits(float(attributes[name])) for name in ("scale", "softcap")]
    places = [*range(1, 9), ABSENT, ABSENT, ABSENT]
    steps = [
        (ATTENTION, -2, 0, ABSENT, ABSENT, *places, *sizes, *floats, 0),
        (ADD, -1, -2, -2, ABSENT),
    ]
    numbers = program([1024, 1024], 1, steps)
    found = host.run(Call("Chain", ALONE, [numbers, packed, *inputs[3:11]], threads=2, copies=2))
    np.testing.assert_array_equal(found, 2 * expected)
