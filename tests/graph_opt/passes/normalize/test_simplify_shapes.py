from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.analysis.probe_sizes import PROBES
from carryall.graph_opt.analysis.shape_facts import ShapeFacts
from carryall.graph_opt.passes.normalize.simplify_shapes import SimplifyShapesPass, reshape_target

INPUTS = "g (int64[b, s] input_ids, int64[b, t] attention_mask, float[b, 2, p, 4] past)"
NAMED = {"two": np.array([2]), "four": np.array([4]), "minus": np.array([-1]), "zero": np.array(0)}


def test_shapes_computed_from_shapes_become_constants() -> None:
    body = """x = Cast <to = 1> (input_ids) shape = Shape (x) batch = Gather <axis = 0> (shape, first)
        length = Slice (shape, one, two) target = Concat <axis = 0> (batch, length, one)
        y = Reshape (x, target)"""
    first, one = np.array([0]), np.array([1])
    model = graph(f"{INPUTS} => (float[b, s, 1] y) {{ {body} }}", first=first, one=one, **NAMED)
    assert apply(SimplifyShapesPass(), model) == []
    expected = "x = Cast <to = 1> (input_ids) y = Reshape (x, target)"
    assert_same(model, graph(f"{INPUTS} => (float[b, s, 1] y) {{ {expected} }}", target=np.array([0, 0, 1])))


def test_transposes_cancel_and_reshapes_join() -> None:
    body = """a = Transpose <perm = [0, 2, 1, 3]> (past) c = Transpose <perm = [0, 2, 1, 3]> (a)
        d = Unsqueeze (c, two) e = Squeeze (d, two) f = Neg (e) y = Identity (f)"""
    model = graph(f"{INPUTS} => (float[b, 2, p, 4] y) {{ {body} }}", **NAMED)
    assert apply(SimplifyShapesPass(), model) == []
    assert_same(model, graph(f"{INPUTS} => (float[b, 2, p, 4] y) {{ y = Neg (past) }}"))


@pytest.mark.parametrize(
    ("wide", "narrow", "cancels"),
    [
        ("double", "float", True),
        ("float", "float16", True),
        ("int64", "bool", True),
        ("int64", "uint8", False),
        ("double", "int64", False),
        ("float16", "float", False),
        ("float", "int32", False),
    ],
)
def test_a_cast_to_a_type_that_holds_all_values_and_back_is_none(
    wide: str, narrow: str, cancels: bool
) -> None:
    """Read by a branch of If, onnxruntime does not run such a pair, even without optimizations."""
    numbers = [ir.DataType[name.upper()].value for name in (wide, narrow)]
    body = f"""a = Cast <to = {numbers[0]}> (x) c = Cast <to = {numbers[1]}> (a)
        y = If (yes) <then_branch = t () => ({narrow}[2] p) {{ p = Identity (c) }},
        else_branch = e () => ({narrow}[2] q) {{ q = Identity (c) }}>"""
    model = graph(f"g ({narrow}[2] x, bool yes) => ({narrow}[2] y) {{ {body} }}")
    apply(SimplifyShapesPass(decoder=False), model)
    assert [node.op_type for node in model.graph] == ([] if cancels else ["Cast", "Cast"]) + ["If"]


@pytest.mark.parametrize(
    "body",
    [
        "t = Transpose <perm = [1, 0]> (x) y = Transpose <perm = [1, 0]> (t)",
        "t = Unsqueeze (x, two) y = Squeeze (t, two)",
        "t = Flatten <axis = 0> (x) y = Reshape (t, sizes)",
        "t = Reshape (x, minus) y = Reshape (t, sizes)",
    ],
)
def test_shape_changes_between_an_input_and_an_output_keep_both_names(body: str) -> None:
    model = graph(
        f"g (float[3, 4] x) => (float[3, 4] y, float[3, 4] z) {{ {body} z = Exp (x) }}",
        sizes=np.array([3, 4]),
        **NAMED,
    )
    assert apply(SimplifyShapesPass(), model) == []
    expected = "g (float[3, 4] x) => (float[3, 4] y, float[3, 4] z) { y = Identity (x) z = Exp (x) }"
    assert_same(model, graph(expected))
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["x", "y", "z"]


def test_a_slice_that_takes_a_part_stays() -> None:
    body = "y = Slice (past, zero1, one, two)"
    given = {"zero1": np.array([0]), "one": np.array([1]), "two": np.array([2])}
    model = graph(f"{INPUTS} => (float[b, 2, q, 4] y) {{ {body} }}", **given)
    apply(SimplifyShapesPass(), model)
    assert [node.op_type for node in model.graph] == ["Slice"]


def test_sizes_that_are_equal_by_chance_are_not_used() -> None:
    body = "shape = Shape (input_ids) same = Equal (shape, ones) y = Cast <to = 7> (same)"
    model = graph(f"{INPUTS} => (int64[2] y) {{ {body} }}", ones=np.array([1, 1]))
    facts = ShapeFacts(model.graph)
    assert facts.content(model.graph.outputs[0]) is None
    assert facts.contents(model.graph.outputs[0])[0].tolist() == [1, 1]  # type: ignore[index]


def test_two_dynamic_sizes_are_not_a_constant() -> None:
    before = tuple((probe.batch, probe.sequence * 3) for probe in PROBES)
    after = tuple((probe.sequence, 3, probe.batch) for probe in PROBES)
    assert reshape_target(before, after) is None


def test_a_graph_with_a_short_table_is_tried_with_few_tokens() -> None:
    """The graph does not run beyond its table's 100 rows, so larger sizes are not probed."""
    body = """s = Shape <start = 2, end = 3> (past) part = Slice(table, first, s, first)
        t = Cast <to = 1> (part) one = Unsqueeze(t, axes) y = Add(past, one)"""
    given = {"table": np.ones((100, 4), np.int64), "first": np.array([0]), "axes": np.array([0, 1])}
    model = graph(f"{INPUTS} => (float[b, 2, p, 4] y) {{ {body} }}", **given)
    facts = ShapeFacts(model.graph)
    assert facts.symbolic(model.graph[-2].outputs[0]) == [1, 1, "past", 4]


def test_axes_of_other_graphs_are_known_by_their_own_names() -> None:
    """Outside of the contract, input_ids may have any axes; an axis without a name is independent."""
    text = """g (int64[rows, words] input_ids, int64[rows, words] types, float[n, h, w] picture) =>
        (int64[rows, words] y, int64[3] z) { s = Shape(input_ids) e = Expand(types, s) y = Add(input_ids, e)
        z = Shape(picture) }"""
    model = graph(text)
    model.graph.inputs[2].shape = ir.Shape([None, None, None])
    apply(SimplifyShapesPass(decoder=False), model)
    assert [node.op_type for node in model.graph] == ["Add", "Shape"]


def test_graphs_with_a_minimum_image_size_are_simplified() -> None:
    text = """g (float[n, 3, h, w] x) => (float[n, 3, a, b] y) {
        c = AveragePool <kernel_shape = [9, 9]> (x) s = Shape(c) r = Reshape(c, s) y = Relu(r) }"""
    model = graph(text)
    apply(SimplifyShapesPass(decoder=False), model)
    assert [node.op_type for node in model.graph] == ["AveragePool", "Relu"]


@pytest.mark.parametrize("step", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("pads", "length", "kept"),
    [
        (0, "up", False),  # n / step rounded up is what is there
        (0, "n", True),  # less, but for multiples of step
        (1, "up", True),  # less for multiples of step
    ],
)
def test_a_slice_that_takes_all_for_most_lengths_stays(pads: int, length: str, kept: bool, step: int) -> None:
    shape = f"kernel_shape = [{step + pads}], strides = [{step}], pads = [{pads}, {step - 1 + pads}]"
    body = f"""c = MaxPool<{shape}> (x)
        n = Shape<start = 2, end = 3>(x) up = Add(n, less) total = Div({length}, step)
        y = Slice(c, zero1, total, two)"""
    given = {"zero1": [0], "two": [2], "less": [step - 1], "step": [step]}
    arrays = {name: np.array(content) for name, content in given.items()}
    model = graph(f"g (float[b, 2, n] x) => (float[b, 2, m] y) {{ {body} }}", **arrays)
    apply(SimplifyShapesPass(decoder=False), model)
    assert ("Slice" in [node.op_type for node in model.graph]) == kept


def test_spectrograms_have_half_the_frequencies() -> None:
    """``onesided`` is 1 unless it is given; onnx 1.23 infers as if it was 0."""
    text = "g (float[b, n, 1] x) => (float y) { y = STFT(x, hop, window) }"
    model = graph(text, hop=np.array(160), window=np.ones(320, np.float32))
    facts = ShapeFacts(model.graph, decoder=False)
    assert {shape[2:] for shape in facts.shapes(model.graph.outputs[0]) or ()} == {(161, 2)}
