"""Random graphs over 140 operators give the source's results: as they are, and optimized for each target.

The reference is onnxruntime without its optimizations. Each graph runs with them too, in carryall's session,
and in OpenVINO. ``pytest -m slow`` draws graphs for a share of ``CARRYALL_FUZZ_SECONDS``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from fuzzing import new_seeds
from openvino_process import OpenVinoProcess
from random_operators import options, random_model

from carryall.errors import GraphError
from carryall.graph_opt.graph.load import check_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes
from carryall.providers import get_provider
from carryall.runtime.api.session import InferenceSession

Arrays = list[npt.NDArray[Any]]
Feed = dict[str, npt.NDArray[Any]]
TARGETS = ("portable", "cpu", "openvino", "webgpu", "cuda")
TOLERANCE, HALF = 2e-4, 2e-2  # of the largest value, which is at least 1
VERDICTS: Counter[str] = Counter()


class SourceRefusedError(Exception):
    """onnxruntime refuses a graph by its shape inference, or drops a Cast that a branch of If reads."""


def optimized(model: onnx.ModelProto, target: str) -> onnx.ModelProto:
    """Return the graph for a target, as ``carryall optimize`` makes it."""
    graph = ir.from_proto(onnx.ModelProto.FromString(model.SerializeToString()))
    passes = model_passes()
    if target != "portable":
        provider = get_provider(target)
        passes = model_passes(provider.model_passes(), provider.kept_products())
    changed, _ = run(graph, passes)
    check_model(changed, target)
    return ir.to_proto(changed)


def results(model: onnx.ModelProto, feed: Feed, level: str) -> Arrays:
    content = model.SerializeToString()
    try:
        session = ort.InferenceSession(content, options(level), providers=["CPUExecutionProvider"])
    except ort.capi.onnxruntime_pybind11_state.Fail as error:
        raise (SourceRefusedError if "ShapeInferenceError" in str(error) else ValueError)(error) from error
    try:
        return [np.asarray(array) for array in session.run(None, feed)]
    except ort.capi.onnxruntime_pybind11_state.Fail as error:
        raise (SourceRefusedError if "Missing Input" in str(error) else ValueError)(error) from error


@pytest.fixture(scope="module")
def openvino() -> Iterator[OpenVinoProcess]:
    pytest.importorskip("openvino")
    with OpenVinoProcess() as process:
        yield process


def differs(found: Arrays, expected: Arrays, tolerance: float) -> str | None:
    """Return how results differ beyond rounding; None if they do not."""
    for index, (left, right) in enumerate(zip(found, expected, strict=True)):
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            return f"output {index}: {left.dtype}{left.shape} for {right.dtype}{right.shape}"
        if right.dtype.kind != "f":
            if not np.array_equal(left, right):
                return f"output {index}: other values"
            continue
        far = np.abs(left.astype(np.float64) - right.astype(np.float64))
        bound = tolerance * max(1.0, float(np.abs(right).max(initial=0)))
        if not (far <= bound).all():
            return f"output {index}: {float(far.max()):.2e}"
    return None


def check(seed: int, openvino: OpenVinoProcess) -> list[str]:
    """Return what is wrong with one graph."""
    model, feed = random_model(seed)
    half = any(
        attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT16
        for node in model.graph.node
        for attribute in node.attribute
    )
    tolerance, wrong = HALF if half else TOLERANCE, []
    try:
        expected = results(model, feed, "ORT_DISABLE_ALL")
    except SourceRefusedError:  # though each node ran alone
        VERDICTS["onnxruntime refuses the source"] += 1
        return []

    def compare(what: str, found: Arrays) -> bool:
        VERDICTS[what] += 1
        difference = differs(found, expected, tolerance)
        if difference is not None:
            wrong.append(f"{what}: {difference}")
        return difference is None

    try:
        fused_right = differs(results(model, feed, "ORT_ENABLE_ALL"), expected, tolerance) is None
    except Exception:  # noqa: BLE001 -- onnxruntime's own optimizations can make a graph that it refuses
        fused_right = False
    if not fused_right:
        VERDICTS["onnxruntime's optimizations are wrong"] += 1
    session = InferenceSession(model.SerializeToString(), providers=["cpu"])
    compare("session", [np.asarray(array) for array in session.run(None, feed)])
    peer = openvino.results(model.SerializeToString(), feed)
    if peer is not None and differs(peer, expected, 10 * tolerance) is not None:
        VERDICTS["OpenVINO is wrong about the source"] += 1
        peer = None
    for target in TARGETS:
        try:
            changed = optimized(model, target)
        except GraphError as error:
            VERDICTS[f"{target} refused: {str(error)[:40]}"] += 1
            continue
        names = [[value.name for value in part] for part in (changed.graph.input, changed.graph.output)]
        # Before IR version 4 every weight is an input that onnxruntime does not let callers set.
        if names != [list(feed), [value.name for value in model.graph.output]]:
            wrong.append(f"{target}: inputs and outputs are {names}")
            continue
        compare(f"{target} off", results(changed, feed, "ORT_DISABLE_ALL"))
        if fused_right:
            compare(f"{target} on", results(changed, feed, "ORT_ENABLE_ALL"))
        if peer is not None and target in ("portable", "openvino"):
            found = openvino.results(changed.SerializeToString(), feed)
            if found is None:
                wrong.append(f"{target} in OpenVINO: it takes the source, and not the optimized graph")
            elif differs(found, expected, 10 * tolerance) is not None:
                wrong.append(f"{target} in OpenVINO: {differs(found, expected, 10 * tolerance)}")
            VERDICTS[f"{target} in OpenVINO"] += 1
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_some_graphs(seed: int, openvino: OpenVinoProcess) -> None:
    assert check(seed, openvino) == []


@pytest.mark.slow
def test_many_graphs(openvino: OpenVinoProcess, capsys: pytest.CaptureFixture[str]) -> None:
    wrong, count = {}, 0
    for seed in new_seeds():
        count += 1
        try:
            found = check(seed, openvino)
        except Exception as error:  # noqa: BLE001 -- the others are tried too
            found = [repr(error)]
        if found:
            wrong[seed] = found
    with capsys.disabled():
        print(f"{count} graphs, of which {openvino.crashes} ended OpenVINO: {dict(VERDICTS)}")
    assert wrong == {}
