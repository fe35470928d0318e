"""Inputs that ``verify`` generates have shapes and values that a graph accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from carryall.errors import GraphError, UsageError
from carryall.graph_opt.compare.input_facts import input_facts
from carryall.graph_opt.compare.sample_inputs import SampleInputs, sample_inputs
from carryall.graph_opt.compare.verify import verify

Array = npt.NDArray[Any]
HEAD = '<ir_version: 10, opset_import: ["": 20]> g'


def net(text: str, **weights: Array) -> ir.Model:
    tensors = [ir.tensor(array, name=name) for name, array in weights.items()]
    return ir.from_onnx_text(f"{HEAD} {text}", initializers=tensors)


def samples(model: ir.Model) -> list[SampleInputs]:
    def run(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"any": next(iter(feed.values()))}

    return sample_inputs(model.graph, run)


def test_indices_stay_inside_the_table_they_read_and_visit_all_of_it() -> None:
    model = net(
        """(int64[batch, sequence] ids) => (float[batch, sequence, 4] y)
        <int64[2] s = {0, -1}> { t = Cast<to = 6>(ids) u = Reshape(t, s) y = Gather(table, u) }""",
        table=np.zeros((9, 4), np.float32),
    )
    seen = np.concatenate([sample.feed["ids"].reshape(-1) for sample in samples(model)])
    assert (seen.min(), seen.max()) == (0, 8)
    assert set(seen.tolist()) == set(range(9))


def test_one_hot_bounds_and_compared_constants_are_read_from_the_graph() -> None:
    model = net("""(int32[batch, 3] bytes, int64 sr) => (float[batch, 3, 7] y, bool z)
        <int64[1] depth = {7}, float[2] v = {0, 1}, int64 rate = {8000}>
        { y = OneHot(bytes, depth, v) z = Equal(sr, rate) }""")
    facts = {one.name: one for one in input_facts(model.graph)}
    assert facts["bytes"].bound == 7
    assert facts["sr"].choices == (8000,)
    assert all(int(sample.feed["sr"]) == 8000 for sample in samples(model))


ML = '<ir_version: 10, opset_import: ["": 20, "ai.onnx.ml": 3, "com.microsoft": 1]> g'
INDEXED = {
    "rows": ("(int64[n] i) => (float[n, 4] y) { y = Gather(t, i) }", 3),
    "columns": ("(int64[n] i) => (float[3, n] y) { y = Gather<axis = 1>(t, i) }", 4),
    "the last axis": ("(int64[n] i) => (float[3, n] y) { y = ai.onnx.ml.ArrayFeatureExtractor(t, i) }", 4),
    "elements": ("(int64[n, 2] i) => (float[n, 2] y) { y = GatherElements<axis = -2>(t, i) }", 3),
    "rows of two numbers": ("(int64[n, 2] i) => (float[n] y) { y = GatherND(t, i) }", 3),
    "written elements": (
        "(int64[2, 2] i, float[2, 2] u) => (float[3, 4] y) { y = ScatterElements<axis = 1>(t, i, u) }",
        4,
    ),
    "floats": ("(float[n] i) => (float[n, 4] y) { j = Cast<to = 7>(i) y = Gather(t, j) }", 3),
    "after padding": (
        "(int64[n] i) => (float[m, 4] y) <int64[1] c = {0}> { j = Concat<axis = 0>(c, i) y = Gather(t, j) }",
        3,
    ),
    "one of two inputs": (
        """(int64[2, n] i) => (float[n, 4] y) <int64 s = {0}>
        { j = Gather<axis = 0>(i, s) y = Gather(t, j) }""",
        3,
    ),
}


@pytest.mark.parametrize("case", INDEXED)
def test_indices_are_below_the_size_of_the_axis_that_they_index(case: str) -> None:
    text, bound = INDEXED[case]
    table = ir.tensor(np.arange(12, dtype=np.float32).reshape(3, 4), name="t")
    model = ir.from_onnx_text(f"{ML} {text}", initializers=[table])
    seen = np.concatenate([sample.feed["i"].reshape(-1) for sample in samples(model)])
    assert set(seen.tolist()) == set(range(bound))
    assert verify(model, model).passed


DYNAMIC = {
    "an input": ("(float[rows, 4] t, int64[n] i)", "y = ai.onnx.ml.ArrayFeatureExtractor(u, i)", 0),
    "a computed tensor": ("(float[rows, 4] t, int64[n] i)", "v = Exp(u) y = Gather<axis = 1>(v, i)", 0),
    "a count": (
        "(float[4, rows] t, int64[4] i)",
        "y = ReverseSequence<time_axis = 1, batch_axis = 0>(t, i)",
        1,
    ),
}


@pytest.mark.parametrize("case", DYNAMIC)
def test_indices_are_below_the_size_of_a_dynamic_axis(case: str) -> None:
    inputs, body, more = DYNAMIC[case]
    model = ir.from_onnx_text(f"{ML} {inputs} => (float[p, q] y) {{ u = Transpose(t) {body} }}")
    seen = [(sample.feed["t"], sample.feed["i"]) for sample in samples(model)]
    sizes = [table.shape[1 if more else 0] for table, _ in seen]
    assert all(indices.max() < size + more for size, (_, indices) in zip(sizes, seen, strict=True))
    assert any(indices.max() == size + more - 1 for size, (_, indices) in zip(sizes, seen, strict=True))
    assert verify(model, model).passed


def test_tables_of_one_row_bound_segments_and_lengths() -> None:
    model = net(
        """(int64[n, sequence] token_type_ids, float[sequence, n, 3] x, int32[n] lengths)
        => (float[n, sequence, 4] y, float[s, 1, n, 2] z)
        { y = Gather(t, token_type_ids) z = LSTM<hidden_size = 2>(x, w, r, , lengths) }""",
        t=np.zeros((1, 4), np.float32),
        w=np.zeros((1, 8, 3), np.float32),
        r=np.zeros((1, 8, 2), np.float32),
    )
    for sample in samples(model):
        assert not sample.feed["token_type_ids"].any()
        assert sample.feed["lengths"].max() <= sample.feed["x"].shape[0]
    assert verify(model, model).passed


def test_a_bound_that_no_shape_tells_is_found_by_trying() -> None:
    """The first inputs may happen to be in range, so all must be accepted."""
    model = net(
        """(int64 i) => (float[1] y) <int64[1] zero = {0}, int64[1] one = {1}>
        { j = Add(i, zero) k = Unsqueeze(j, zero) y = Gather(t, k) }""",
        t=np.zeros(3, np.float32),
    )
    assert {int(seed_feed) for seed_feed in first_indices(model)} <= {0, 1, 2}


def first_indices(model: ir.Model) -> list[Array]:
    """Return the indices that are drawn with seeds of which some first draw is in range by luck."""

    def run(feed: Mapping[str, Array]) -> dict[str, Array]:
        if int(feed["i"]) > 2:
            raise GraphError("out of range")
        return {"y": feed["i"].reshape(1)}

    return [sample.feed["i"] for seed in range(40) for sample in sample_inputs(model.graph, run, seed=seed)]


def test_axes_with_one_name_have_one_size_and_masks_hide_elements() -> None:
    model = net("""(float[n, time, 3] features, int64[n, time] attention_mask, int64[n] feature_lengths)
        => (float[n, time, 3] y) { y = Neg(features) }""")
    for sample in samples(model):
        batch, time, _ = sample.feed["features"].shape
        assert sample.feed["attention_mask"].shape == (batch, time)
        assert (sample.feed["feature_lengths"] <= time).all()
    masks = [sample.feed["attention_mask"] for sample in samples(model)]
    assert masks[0].all()
    assert not masks[1][:, -1].all()
    assert not masks[2][:, 0].all()


def test_sizes_grow_until_the_reference_runs() -> None:
    """Speech models refuse inputs that are shorter than their window."""
    text = "(float[batch, samples] x) => (float[batch, 1] y) <int64[2] at = {0, 200}> "
    slice_ = "<int64[1] s = {500}, int64[1] e = {501}, int64[1] a = {1}, float[1, 1] w = {2}>"
    model = net(
        text.replace(" <int64[2] at = {0, 200}>", f" {slice_}") + "{ t = Slice(x, s, e, a) y = MatMul(t, w) }"
    )
    found = verify(model, model)
    assert found.passed
    assert any("x float32[2, 512]" in line for line in found.inputs)


def test_states_go_on_from_run_to_run() -> None:
    model = net("(float[1, 2] state, float[1, 2] x) => (float[1, 2] stateN) { stateN = Add(state, x) }")

    def run(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"stateN": feed["state"] + feed["x"]}

    found = sample_inputs(model.graph, run)
    assert not found[0].feed["state"].any()
    np.testing.assert_array_equal(found[1].feed["state"], found[0].feed["x"])


def test_inputs_that_cannot_be_generated_are_named() -> None:
    model = net("(seq(float[2]) xs) => (float[2] y) <int64 i = {0}> { y = SequenceAt(xs, i) }")
    model.graph.inputs[0].shape = None
    with pytest.raises(UsageError, match=r"no input can be generated for xs .*give --inputs"):
        verify(model, model)
    never = net("(float[batch, 3] x) => (float[batch, 5] y) <int64[2] s = {7, 5}> { y = Reshape(x, s) }")
    with pytest.raises(GraphError, match=r"refuses all \d+ generated inputs for x; give --inputs"):
        verify(never, never)


@pytest.mark.parametrize("kind", ["float", "double", "float16", "bool", "int64", "int32", "string"])
def test_inputs_of_rank_0_are_arrays(kind: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]> g ({kind} c, float[3] x) => ({kind} y, float[3] z)
        {{ y = Identity(c) z = Relu(x) }}"""
    found = verify(ir.from_onnx_text(text), ir.from_onnx_text(text))
    assert found.passed
    assert set(found.outputs) == {"y", "z"}


def test_sequences_and_optional_values_are_generated() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (seq(float[n, 3]) s, optional(float[n, 3]) o)
        => (float[m, 3] y) {
        a = ConcatFromSequence<axis = 0>(s) b = OptionalGetElement(o) y = Concat<axis = 0>(a, OP) }"""
    same, other = (ir.from_onnx_text(text.replace("OP", name)) for name in ("b", "a"))
    found = verify(same, same)
    assert found.passed
    assert "s 2 times float32[2, 3], o float32[2, 3]" in found.text()
    assert not verify(same, other).passed
