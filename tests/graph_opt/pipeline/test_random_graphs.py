"""Random graphs stay valid and give the same results after the whole generic pipeline."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from random_graphs import FOREIGN, SHAPE, models
from random_typed_graphs import typed_model

from carryall.graph_opt.graph.load import check_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes, portable_passes

Arrays = list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]
Passes = Callable[[], list[ir.passes.PassBase]]
EXAMPLES = int(os.environ.get("CARRYALL_RANDOM_GRAPHS", "30"))  # examples of each kind
quiet = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
both = pytest.mark.parametrize("passes", [portable_passes, model_passes])


def interface(proto: onnx.ModelProto) -> list[tuple[str, bytes]]:
    """Return the name, type and shape of each input and output, in order."""
    values = [*proto.graph.input, *proto.graph.output]
    return [(value.name, value.type.SerializeToString(deterministic=True)) for value in values]


def evaluate(proto: onnx.ModelProto, names: list[str], seed: int) -> Arrays:
    """Run a model in ONNX's evaluator: onnxruntime 1.31 loses Cast(Cast(input)) that a loop's body reads."""
    rng = np.random.default_rng(seed)
    feed = {name: rng.standard_normal(SHAPE, np.float32) for name in names}
    with np.errstate(all="ignore"):
        return [np.asarray(result) for result in ReferenceEvaluator(proto).run(None, feed)]


@pytest.mark.long
@both
@quiet
@given(model=models(), seed=st.integers(0, 2**31))
def test_optimized_graphs_give_equal_results(passes: Passes, model: ir.Model, seed: int) -> None:
    before = ir.to_proto(model)
    onnx.checker.check_model(before, full_check=True)
    optimized, _ = run(model, passes())
    check_model(optimized, "optimized")
    after = ir.to_proto(optimized)
    onnx.checker.check_model(after)
    assert interface(after) == interface(before)
    names = [value.name for value in before.graph.input]
    for expected, found in zip(evaluate(before, names, seed), evaluate(after, names, seed), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.long
@both
@quiet
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=168384)  # min(size, 2) is 2 for sizes that the graph needs, and 1 for one that it does not
def test_types_shapes_and_opsets_of_all_kinds(passes: Passes, seed: int) -> None:
    """These graphs have no fusions, so the results are bit-identical."""
    before, feed = typed_model(seed)
    onnx.checker.check_model(before)
    copy = onnx.ModelProto.FromString(before.SerializeToString())  # tensors that are renamed are before's own
    optimized, _ = run(ir.from_proto(copy), passes())
    check_model(optimized, "optimized")
    after = ir.to_proto(optimized)
    onnx.checker.check_model(after)
    assert interface(after) == interface(before)
    with np.errstate(all="ignore"):
        results = [ReferenceEvaluator(model).run(None, feed) for model in (before, after)]
    for expected, found in zip(*results, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, expected)


def foreign_nodes(model: ir.Model) -> Counter[str]:
    """Return the properties of nodes of the unknown domain, which no pass may change."""
    nodes = [node for node in model.graph.all_nodes() if node.domain == FOREIGN]
    return Counter(
        f"{node.op_type} {sorted((name, str(a.value)) for name, a in node.attributes.items())} "
        f"{[value is None for value in node.inputs]} {len(node.outputs)}"
        for node in nodes
    )


@pytest.mark.long
@both
@quiet
@given(model=models(foreign=True))
def test_operators_of_an_unknown_domain_are_left_alone(passes: Passes, model: ir.Model) -> None:
    before = foreign_nodes(model)
    optimized, _ = run(model, passes())
    check_model(optimized, "optimized")
    onnx.checker.check_model(ir.to_proto(optimized))
    after = foreign_nodes(optimized)
    assert not after - before  # equal nodes may be merged and unused nodes removed
    if after:
        assert optimized.opset_imports[FOREIGN] == 7
