"""Graphs with maps are read, changed and written; a message about a damaged one names its own fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from click.testing import CliRunner

from carryall.cli import carryall
from carryall.errors import GraphError
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.graph.map_types import restore_map_types
from carryall.runtime.api.session import InferenceSession

TEXT = """<ir_version: 3, opset_import: ["ai.onnx.ml" : 1]>
g (float[3, 2] x) => (int64[3] label, seq(map(int64, float)) probabilities) {
    label, scores = ai.onnx.ml.LinearClassifier <
        classlabels_ints = [0, 1], coefficients = [1.0, 2.0, -1.0, 0.5],
        intercepts = [0.1, 0.2], post_transform = "SOFTMAX"> (x)
    probabilities = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1]> (scores)
}"""
X = np.array([[1, 2], [-1, 0.5], [0, 3]], np.float32)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "classifier.onnx")
    return tmp_path / "classifier.onnx"


@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_a_classifier_is_optimized_for_every_target(classifier: Path, tmp_path: Path, target: str) -> None:
    out = tmp_path / "out.onnx"
    result = CliRunner().invoke(
        carryall, ["optimize", str(classifier), str(out), "--target", target, "--verify"]
    )
    assert result.exit_code == 0, result.output
    onnx.checker.check_model(out)  # which insists on the type of every output
    before, after = (InferenceSession(str(path)).run(None, {"x": X}) for path in (classifier, out))
    np.testing.assert_array_equal(before[0], after[0])
    assert before[1] == after[1]
    assert isinstance(after[1][0], dict)


def test_types_come_back_when_written(classifier: Path, tmp_path: Path) -> None:
    model = load_model(classifier)
    assert model.graph.outputs[1].type is None
    ir.save(model, tmp_path / "again.onnx")
    restore_map_types(model, tmp_path / "again.onnx")
    stated = [onnx.load(path).graph.output for path in (classifier, tmp_path / "again.onnx")]
    assert stated[0][1].type == stated[1][1].type
    session = onnxruntime.InferenceSession(tmp_path / "again.onnx")
    assert session.get_outputs()[1].type == "seq(map(int64,tensor(float)))"


def test_a_damaged_file_with_maps_is_refused_for_its_damage(classifier: Path) -> None:
    proto = onnx.load(classifier)
    proto.graph.node[1].input[0] = "nowhere"
    onnx.save(proto, classifier)
    with pytest.raises(GraphError, match=r"reads nowhere, which no node"):
        load_model(classifier)
