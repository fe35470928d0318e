"""InferenceSession against onnxruntime's own: the same methods, signatures and results."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from carryall import InferenceSession

CPU = ["CPUExecutionProvider"]
Feeds = dict[str, Any]

SCALE = """
<ir_version: 10, opset_import: ["" : 21]>
scale (float[n, 3] x) => (float[n, 3] y, float[n] total)
<float[1] factor = {2.0}, int64[1] last = {-1}>
{
   y = Mul(x, factor)
   total = ReduceSum <keepdims = 0> (y, last)
}
"""
# Both an input and an initializer: what onnxruntime calls overridable.
OVERRIDABLE = """
<ir_version: 10, opset_import: ["" : 21]>
shift (float[n] x, float[1] offset = {1.5}) => (float[n] y) { y = Add(x, offset) }
"""
PICK = """
<ir_version: 10, opset_import: ["" : 21]>
pick (float[n, 2] table, int64[m] index, bool[m] keep) => (float[k, 2] chosen, seq(float[n, 2]) same)
{
   rows = Gather(table, index)
   chosen = Compress <axis = 0> (rows, keep)
   same = SequenceConstruct(table)
}
"""


def cnn() -> ir.Model:
    """Two convolutions, a pooling and a linear layer: not a decoder."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (4, 1, 3, 3), "w2": (8, 4, 3, 3), "w3": (8, 5)}
    weights = {
        name: ir.Value(
            name=name, const_value=ir.tensor(rng.standard_normal(shape).astype(np.float32), name=name)
        )
        for name, shape in shapes.items()
    }
    image = ir.val("image", ir.DataType.FLOAT, ["batch", 1, 12, 12])
    tape = ir.tape.Tape()
    x = tape.op("Relu", [tape.op("Conv", [image, weights["w1"]])])
    x = tape.op("MaxPool", [tape.op("Relu", [tape.op("Conv", [x, weights["w2"]])])], {"kernel_shape": [2, 2]})
    x = tape.op("MatMul", [tape.op("Flatten", [tape.op("GlobalAveragePool", [x])]), weights["w3"]])
    x.name, x.dtype, x.shape = "scores", ir.DataType.FLOAT, ir.Shape(["batch", 5])
    nodes, constants = tape.nodes, list(weights.values())
    return ir.Model(
        ir.Graph([image], [x], nodes=nodes, initializers=constants, opset_imports={"": 21}, name="cnn"),
        ir_version=10,
    )


RNG = np.random.default_rng(1)
CASES: dict[str, tuple[ir.Model, Feeds]] = {
    "scale": (ir.from_onnx_text(SCALE), {"x": RNG.standard_normal((4, 3)).astype(np.float32)}),
    "overridable": (ir.from_onnx_text(OVERRIDABLE), {"x": np.arange(3, dtype=np.float32)}),
    "overridden": (
        ir.from_onnx_text(OVERRIDABLE),
        {"x": np.arange(3, dtype=np.float32), "offset": np.array([9], np.float32)},
    ),
    "pick": (
        ir.from_onnx_text(PICK),
        {
            "table": RNG.standard_normal((3, 2)).astype(np.float32),
            "index": np.array([2, 0]),
            "keep": np.array([True, False]),
        },
    ),
    "cnn": (cnn(), {"image": RNG.standard_normal((2, 1, 12, 12)).astype(np.float32)}),
}
DENSE = ["scale", "overridable", "cnn"]  # tensors only, as IO binding and OrtValues want them
PUBLIC = [name for name in dir(onnxruntime.InferenceSession) if not name.startswith("_")]


def content(case: str) -> bytes:
    return ir.to_proto(CASES[case][0]).SerializeToString()


def pair(case: str) -> tuple[InferenceSession, Any]:
    data = content(case)
    return InferenceSession(data, providers=["cpu"]), onnxruntime.InferenceSession(data, providers=CPU)


def assert_same(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other), strict=True)


def described(values: Any) -> list[tuple[str, str, list[Any]]]:
    return [(value.name, value.type, value.shape) for value in values]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_method_has_onnxruntimes_signature(name: str) -> None:
    ours, theirs = getattr(InferenceSession, name), getattr(onnxruntime.InferenceSession, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_the_constructor_takes_onnxruntimes_arguments_in_order() -> None:
    theirs = [
        parameter.name
        for parameter in inspect.signature(onnxruntime.InferenceSession).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    ours = inspect.signature(InferenceSession).parameters
    assert [name for name, value in ours.items() if value.kind is value.POSITIONAL_OR_KEYWORD] == theirs
    assert isinstance(pair("scale")[0], onnxruntime.InferenceSession)


@pytest.mark.parametrize("case", CASES)
def test_run_and_metadata_are_the_same(case: str) -> None:
    ours, theirs = pair(case)
    assert_same(ours.run(None, CASES[case][1]), theirs.run(None, CASES[case][1]))
    first = [theirs.get_outputs()[0].name]
    assert_same(ours.run(first, CASES[case][1]), theirs.run(first, CASES[case][1]))
    for getter in ("get_inputs", "get_outputs", "get_overridable_initializers"):
        assert described(getattr(ours, getter)()) == described(getattr(theirs, getter)())
    for getter in ("get_providers", "get_provider_options"):
        assert getattr(ours, getter)() == getattr(theirs, getter)()
    assert ours.get_modelmeta().graph_name == theirs.get_modelmeta().graph_name
    assert ours.get_session_options().log_severity_level == theirs.get_session_options().log_severity_level


@pytest.mark.parametrize("case", DENSE)
def test_ortvalues_and_io_binding(case: str) -> None:
    ours, theirs = pair(case)
    feeds = CASES[case][1]
    expected = theirs.run(None, feeds)
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    assert_same([value.numpy() for value in ours.run_with_ort_values(None, values)], expected)
    binding = ours.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in ours.get_outputs():
        binding.bind_output(output.name)
    ours.run_with_iobinding(binding)
    assert_same(binding.copy_outputs_to_cpu(), expected)


@pytest.mark.parametrize("case", DENSE)
def test_run_async(case: str) -> None:
    ours, theirs = pair(case)
    done, results = threading.Event(), list[Any]()

    def callback(outputs: Any, user_data: object, error: str) -> None:
        results.extend([outputs, user_data, error])
        done.set()

    ours.run_async(None, CASES[case][1], callback, "mine")
    assert done.wait(30)
    assert results[1:] == ["mine", ""]
    assert_same(results[0], theirs.run(None, CASES[case][1]))


def test_profiling(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = InferenceSession(content("scale"), options, ["cpu"])
    session.run(None, CASES["scale"][1])
    assert '"Mul' in Path(session.end_profiling()).read_text()


def test_a_model_may_be_a_path_or_lie_in_memory(tmp_path: Path) -> None:
    model, feeds = CASES["cnn"]
    path = tmp_path / "model.onnx"
    ir.save(model, path, external_data="weights.data", size_threshold_bytes=0)
    expected = onnxruntime.InferenceSession(path, providers=CPU).run(None, feeds)
    for source in (path, str(path), model, ir.to_proto(model), ir.load(path)):
        assert_same(InferenceSession(source, providers=["cpu"]).run(None, feeds), expected)


def test_set_providers_opens_again() -> None:
    ours, theirs = pair("scale")
    ours.set_providers(["cpu"])
    assert_same(ours.run(None, CASES["scale"][1]), theirs.run(None, CASES["scale"][1]))


def test_without_providers_it_runs_where_onnxruntime_would() -> None:
    data = content("scale")
    assert InferenceSession(data).get_providers() == onnxruntime.InferenceSession(data).get_providers()
