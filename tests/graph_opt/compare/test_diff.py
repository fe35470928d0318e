"""``diff`` on graphs with known differences."""

from __future__ import annotations

import random

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graph_asserts import graph
from hypothesis import given
from hypothesis import strategies as st

from carryall.graph_opt.compare.diff import GraphDiff, diff

LAYERS = 6
WIDTH = 16


def net(layers: int = LAYERS) -> ir.Model:
    """Return layers of two products each, which differ only in their weights."""
    rng = np.random.default_rng(0)
    body, x = "", "x"
    weights: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    for layer in range(layers):
        body += f"""n{layer} = RMSNormalization <epsilon = 1e-5> ({x}, scale)
            g{layer} = MatMul(n{layer}, gate{layer}) u{layer} = MatMul(n{layer}, up{layer})
            s{layer} = Sigmoid(g{layer}) m{layer} = Mul(s{layer}, u{layer}) h{layer} = Add({x}, m{layer}) """
        weights |= {
            f"{kind}{layer}": rng.standard_normal((WIDTH, WIDTH), np.float32) for kind in ("gate", "up")
        }
        x = f"h{layer}"
    text = f"g (float[N, {WIDTH}] x) => (float[N, {WIDTH}] y) {{ {body} y = Identity({x}) }}"
    return graph(text, scale=np.ones(WIDTH, np.float32), **weights)


def renamed(model: ir.Model, seed: int) -> ir.Model:
    """Return the graph with other names and another valid order of nodes."""
    rng = random.Random(seed)
    for number, node in enumerate(model.graph):
        node.name = f"node{rng.random()}"
        for value in node.outputs:
            if not value.is_graph_output():
                value.name = f"value{number}"
    for number, value in enumerate(list(model.graph.initializers.values())):
        value.name = f"weight{number}"
    nodes = list(model.graph)
    waiting = {node: {p for v in node.inputs if v is not None and (p := v.producer())} for node in nodes}
    model.graph.remove(nodes)
    while waiting:
        chosen = rng.choice([node for node, before in waiting.items() if not before])
        del waiting[chosen]
        model.graph.append(chosen)
        for before in waiting.values():
            before.discard(chosen)
    return model


def node_of(model: ir.Model, op_type: str, index: int) -> ir.Node:
    return [node for node in model.graph if node.op_type == op_type][index]


@pytest.mark.long
@given(seed=st.integers(0, 2**32))
def test_names_and_order_are_ignored(seed: int) -> None:
    found = diff(net(), renamed(net(), seed))
    assert found.same
    assert found == GraphDiff(matched=LAYERS * 6 + 1)


@pytest.mark.long
@given(seed=st.integers(0, 2**32), layers=st.sets(st.integers(0, LAYERS - 1), min_size=1))
def test_only_the_changed_attribute_is_found(seed: int, layers: set[int]) -> None:
    other = net()
    for layer in layers:
        node_of(other, "RMSNormalization", layer).attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)
    found = diff(net(), renamed(other, seed))
    assert [one.changes for one in found.nodes] == [["epsilon: 1e-05 -> 0.001"]] * len(layers)
    assert (found.only_a, found.only_b, found.weights, found.interface) == ([], [], [], [])


@pytest.mark.long
@given(seed=st.integers(0, 2**32), layer=st.integers(0, LAYERS - 1))
def test_only_the_changed_weight_is_found(seed: int, layer: int) -> None:
    other = net()
    value = other.graph.initializers[f"up{layer}"]
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    array[3, 4] += 0.5
    value.const_value = ir.tensor(array, name=value.name)
    found = diff(net(), renamed(other, seed))
    assert [(one.a, one.change) for one in found.weights] == [
        (f"up{layer}", f"1 of {WIDTH * WIDTH} values differ, by 0.5 at most")
    ]
    assert (found.only_a, found.only_b, found.nodes) == ([], [], [])


def test_an_operator_replaced_in_every_layer_leaves_the_rest_matched() -> None:
    other = net()
    for _ in range(LAYERS):
        node_of(other, "Sigmoid", 0).op_type = "Tanh"
    found = diff(net(), renamed(other, 1))
    assert found.operators == {"Sigmoid": (LAYERS, 0), "Tanh": (0, LAYERS)}
    assert {op for op, _ in found.only_a} == {"Sigmoid"}
    assert {op for op, _ in found.only_b} == {"Tanh"}
    assert len(found.only_a) == len(found.only_b) == LAYERS
    assert {one.op_type for one in found.nodes} == {"Mul"}  # Mul reads another node


def test_swapped_weights_and_operands_are_found() -> None:
    other = net()
    gate, up = (node_of(other, "MatMul", index) for index in (0, 1))
    swapped = gate.inputs[1], up.inputs[1]
    gate.replace_input_with(1, swapped[1])
    up.replace_input_with(1, swapped[0])
    assert not diff(net(), other).same
    other = net()
    product = node_of(other, "Mul", 0)
    left, right = product.inputs
    product.replace_input_with(0, right)
    product.replace_input_with(1, left)
    (changed,) = diff(net(), other).nodes
    assert [change[:9] for change in changed.changes] == ["operand 0", "operand 1"]


LOOP = """g (float[3] x) => (float[3] y) { n = Constant <value_int = 3>() t = Constant <value = bool {1}>()
    y = Loop(n, t, x) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w)
    { d = Identity(c) w = OP(v, x) }> }"""


def test_subgraphs_count_by_their_structure() -> None:
    same = LOOP.replace("float[3] v", "float[3] other").replace("OP(v", "OP(other").replace("w", "ww")
    assert diff(graph(LOOP.replace("OP", "Add")), graph(same.replace("OP", "Add"))).same
    found = diff(graph(LOOP.replace("OP", "Add")), graph(LOOP.replace("OP", "Sub")))
    assert [one.changes for one in found.nodes] == [["body: the graph differs"]]
    assert found.operators == {"Add": (1, 0), "Sub": (0, 1)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("g (float[N, 4] x) => (float[N, 4] z) { z = Abs(x) }", ["output y is named z"]),
        ("g (float[N, 8] x) => (float[N, 4] y) { y = Abs(x) }", ["input x FLOAT [N,4] is FLOAT [N,8]"]),
        (
            "g (float[N, 4] x, int64 k) => (float[N, 4] y, float[N, 4] x2) { y = Abs(x) x2 = Neg(x) }",
            ["input k INT64 [] only in B", "output x2 FLOAT [N,4] only in B"],
        ),
    ],
)
def test_the_interface_is_compared(text: str, words: list[str]) -> None:
    found = diff(graph("g (float[N, 4] x) => (float[N, 4] y) { y = Abs(x) }"), graph(text))
    assert found.interface == words


def test_outputs_of_other_nodes_are_found() -> None:
    text = "g (float[N] x) => (float[N] y, float[N] z) { y = A(x) z = B(x) }"
    found = diff(
        graph(text.replace("A", "Abs").replace("B", "Neg")),
        graph(text.replace("A", "Neg").replace("B", "Abs")),
    )
    assert not found.same


def test_opsets_and_functions_are_compared() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
        g (float[N] x) => (float[N] y) { y = own.Twice(x) }
        <domain: "own", opset_import: ["" : 20]> Twice (a) => (b) { b = Add(a, a) }"""

    def model(content: str) -> ir.Model:
        return ir.from_proto(onnx.parser.parse_model(content))

    assert diff(model(text), model(text)).same
    changed = diff(model(text), model(text.replace("Add", "Mul")))
    assert (changed.only_a, changed.only_b) == ([("Add", "")], [("Mul", "")])
    newer = diff(model(text), model(text.replace('"" : 20, "own"', '"" : 21, "own"')))
    assert newer.interface == ["opset ai.onnx: 20 -> 21"]


def test_thousands_of_nodes_cost_a_bounded_number_of_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = ir.Value.uses

    def counted(self: ir.Value) -> object:
        nonlocal calls
        calls += 1
        return original(self)

    monkeypatch.setattr(ir.Value, "uses", counted)
    counts = []
    for layers in (20, 40):
        calls = 0
        other = net(layers)
        for layer in range(layers):
            node_of(other, "RMSNormalization", layer).attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)
        diff(net(layers), other)
        counts.append(calls)
    assert counts[1] < 2.2 * counts[0]
