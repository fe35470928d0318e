"""A group of nodes becomes one chain that computes the same, and only where all rows are the same ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from chain_reference import run_nodes
from graph_asserts import apply, assert_same, graph
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.graph_opt.lower.chain.chain_pass import ChainPass

RNG = np.random.default_rng(0)
FACTS = "bits = 4, block_size = 32, group_size = 0, offsets = 0"
SIZES = """num_heads = 2, kv_num_heads = 1, head_size = 4, block_size = 32, window = 0, rotary_dim = 4,
    interleaved = 0, cache_type = 1, scale = 0.5, softcap = 0.0, reads_only = 0"""
HEAD = """g (float[T, 1, 8] x, uint8[B, 1, 32, 8] k0, uint8[B, 1, 32, 8] v0, int32[N1] begins, int32[N] past,
    int32[N, M] table)"""


def linear(out: str, x: str, inputs: int, outputs: int, bias: str = "") -> str:
    tiles = f"t{inputs % 5}"
    facts = f"inputs = {inputs}, outputs = {outputs}, {FACTS}"
    return f"{out} = carryall.QuantizedLinear <{facts}> ({x}, {tiles}{', ' + bias if bias else ''})"


def attention(out: str, operands: str) -> str:
    return f"{out} = carryall.PagedAttention <{SIZES}> ({operands}, k0, v0, begins, past, table)"


def skip(outs: str, operands: str) -> str:
    return f"{outs} = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.01> ({operands})"


LAYER = f"""n0 = RMSNormalization <axis = -1, epsilon = 0.001> (x, w8)
    {linear("qkv", "n0", 8, 16)}
    q, k, v = Split <axis = -1> (qkv, s844)
    qn = com.microsoft.BranchwiseRMSNorm <epsilon = 0.1, num_branches = 2> (q, w4)
    {attention("a", "qn, k, v")}
    {linear("o", "a", 8, 8, "b8")}
    {skip("n1, u1, u2, sum1", "x, o, w8")}
    {linear("gu", "n1", 8, 12)}
    m = carryall.SiluAndMul(gu)
    {linear("d", "m", 6, 8)}
    e = Add(sum1, d)
    {skip("n2, u3, u4, sum2", "e, a, w8, b8")}
    {linear("l", "n2", 8, 10)}"""
WEIGHTS = {
    **{f"t{number}": RNG.integers(0, 255, (2, 8), np.uint8) for number in range(5)},
    "w8": np.arange(1, 9, dtype=np.float32),
    "w4": np.array([1, 2, 3, 4], np.float32),
    "b8": np.arange(8, dtype=np.float32),
    "s844": np.array([8, 4, 4]),
    "heads": np.array([0, 0, 2, 4]),
    "joined": np.array([0, 0, 8]),
}


def made(body: str, outputs: str) -> ir.Model:
    widths = {"qkv": 16, "k": 4, "v": 4, "gu": 12, "m": 6, "l": 10}
    model = graph(f"{HEAD} => ({outputs}) {{ {body} }}", **WEIGHTS)
    for value in (value for node in model.graph for value in node.outputs):
        value.shape = ir.Shape(["T", 1, widths.get(str(value.name), 8)])
    return model


def feeds(tokens: int) -> dict[str, Any]:
    tables = {"begins": [0, tokens], "past": [0], "table": [[0, 1]]}
    return {
        "x": RNG.standard_normal((tokens, 1, 8)).astype(np.float32),
        **{name: RNG.integers(0, 255, (3, 1, 32, 8), np.uint8) for name in ("k0", "v0")},
        **{name: np.array(value, np.int32) for name, value in tables.items()},
    }


@pytest.mark.parametrize(
    "outputs",
    ["float[T, 1, 10] l", "float[T, 1, 10] l, float[T, 1, 8] sum2", "float[T, 1, 8] e, float[T, 1, 8] a"],
)
def test_a_layer_becomes_one_node_that_computes_the_same(outputs: str) -> None:
    before, after = made(LAYER, outputs), made(LAYER, outputs)
    assert apply(ChainPass(), after) == []
    assert [node.op_type for node in after.graph] == ["Chain"]
    given_values = feeds(5)
    expected, found = (run_nodes(model.graph, given_values) for model in (before, after))
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_other_nodes_come_first_and_cut_the_chain_only_where_it_needs_them() -> None:
    body = (
        LAYER.replace("e = Add(sum1, d)", "minus = Neg(d) e = Add(sum1, minus)")
        + f" y = Neg(x) {linear('z', 'y', 8, 8)}"
    )
    outputs = "float[T, 1, 10] l, float[T, 1, 8] z"
    before, after = made(body, outputs), made(body, outputs)
    assert apply(ChainPass(), after) == []
    assert [node.op_type for node in after.graph].count("Chain") == 1
    given_values = feeds(3)
    expected, found = (run_nodes(model.graph, given_values) for model in (before, after))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_one_product_stays() -> None:
    body = f"n0 = RMSNormalization <axis = -1> (x, w8) {linear('l', 'n0', 8, 10)}"
    model, same = made(body, "float[T, 1, 10] l"), made(body, "float[T, 1, 10] l")
    apply(ChainPass(), model)
    assert_same(model, same)


def test_a_result_takes_the_register_of_an_operand_that_nothing_reads_later() -> None:
    """A product, a sum and a norm share a register; the sum of a product that is read again has its own."""
    first = f"{linear('a', 'x', 8, 8)} b = Add(a, x) n = RMSNormalization <axis = -1> (b, w8)"
    counts = []
    for last in (linear("l", "n", 8, 10), f"c = Add(n, a) {linear('l', 'c', 8, 10)}"):
        model = made(f"{first} {last}", "float[T, 1, 10] l")
        assert apply(ChainPass(), model) == []
        (chain,) = model.graph
        program = chain.inputs[0]
        assert program is not None
        assert program.const_value is not None
        counts.append(int(program.const_value.numpy()[4]))
    assert counts == [2, 3]  # with that of the output


def test_rows_of_different_lengths_are_refused() -> None:
    text = f"""g (float[T, 1, 8] x, float[S, 1, 8] y) => (float[T, 1, 8] a, float[S, 1, 8] b)
        {{ {linear("a", "x", 8, 8)} {linear("b", "y", 8, 8)} }}"""
    model = graph(text, **WEIGHTS)
    assert apply(ChainPass(), model) == ["its rows have different leading axes"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=14),
    st.data(),
)
def test_random_chains_keep_every_value_as_long_as_it_is_read(steps: list[Any], data: st.DataObject) -> None:
    names, lines = ["x"], []
    for number, (kind, first, second) in enumerate(steps):
        one, other, new = names[first % len(names)], names[second % len(names)], f"v{number}"
        lines.append(
            [
                linear(new, one, 8, 8),
                f"{new} = Add({one}, {other})",
                f"{new} = RMSNormalization <axis = -1, epsilon = 0.5> ({one}, w8)",
                f"{linear(new + 'g', one, 8, 16)} {new} = carryall.SiluAndMul({new}g)",
                skip(f"{new}, {new}b, {new}c, {new}s", f"{one}, {other}, w8"),
            ][kind]
        )
        names += [new, new + "s"] if kind == 4 else [new]
    read = (
        [*names[1:]]
        if len(names) < 3
        else data.draw(st.lists(st.sampled_from(names[1:]), min_size=1, unique=True))
    )
    outputs = ", ".join(f"float[T, 1, 8] {name}" for name in read)
    models = []
    for _ in range(2):
        model = graph(f"g (float[T, 1, 8] x) => ({outputs}) {{ {' '.join(lines)} }}", **WEIGHTS)
        for node in model.graph:
            for value in node.outputs:
                value.shape = ir.Shape(["T", 1, 16 if str(value.name).endswith("g") else 8])
        models.append(model)
    apply(ChainPass(), models[1])
    rows = {"x": RNG.standard_normal((3, 1, 8)).astype(np.float32)}
    with np.errstate(over="ignore", invalid="ignore"):
        expected, found = (run_nodes(model.graph, rows) for model in models)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
