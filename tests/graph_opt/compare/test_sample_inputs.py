"""Inputs that ``verify`` makes up have shapes and values that a graph can take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from carryall.errors import GraphError, UsageError
from carryall.graph_opt.compare.input_facts import input_facts
from carryall.graph_opt.compare.sample_inputs import Sample, sample_inputs
from carryall.graph_opt.compare.verify import verify

Array = npt.NDArray[Any]
HEAD = '<ir_version: 10, opset_import: ["": 20]> g'


def net(text: str, **weights: Array) -> ir.Model:
    tensors = [ir.tensor(array, name=name) for name, array in weights.items()]
    return ir.from_onnx_text(f"{HEAD} {text}", initializers=tensors)


def samples(model: ir.Model) -> list[Sample]:
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


def test_axes_of_one_name_have_one_size_and_masks_hide_something() -> None:
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
    """As in speech models, which refuse what is shorter than their window."""
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


def test_what_cannot_be_made_up_is_named() -> None:
    model = net("(seq(float[2]) xs) => (float[2] y) <int64 i = {0}> { y = SequenceAt(xs, i) }")
    with pytest.raises(UsageError, match=r"no input can be generated for xs .*give --inputs"):
        verify(model, model)
    never = net("(float[batch, 3] x) => (float[batch, 5] y) <int64[2] s = {7, 5}> { y = Reshape(x, s) }")
    with pytest.raises(GraphError, match=r"refuses all \d+ generated inputs for x; give --inputs"):
        verify(never, never)
