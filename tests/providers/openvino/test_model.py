"""OpenVINO models without a provider: reading, running, and rejected models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from carryall.errors import GraphError, ModelNotFoundError, ProviderUnavailableError
from carryall.providers.openvino.model import OpenVinoSession, compile_model, open_core, present_devices, read

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
graph (float[n, 2] x) => (float[n, 2] doubled, float[n, 2] squared)
{
    doubled = Add(x, x)
    squared = Mul(x, x)
}
"""


QUANTIZED = """
<ir_version: 10, opset_import: ["" : 21]>
graph (float[4, 64] x) => (float[4, 24] y)
{
    q = QuantizeLinear(x, one, zero)
    d = DequantizeLinear(q, one, zero)
    v = DequantizeLinear<axis = 1>(w, scales)
    y = MatMul(d, v)
}
"""


ROTARY = """
<ir_version: 10, opset_import: ["" : 23]>
graph (float[n, t, 16] x, float[n, t, 4] cos, float[n, t, 4] sin) => (float[n, t, 16] y)
{
    y = RotaryEmbedding<num_heads = 2>(x, cos, sin)
}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ir.save(ir.from_onnx_text(GRAPH), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_outputs_come_in_the_order_asked_for(path: Path) -> None:
    core = open_core("CPU")
    session = OpenVinoSession(compile_model(core, read(core, path), "CPU", {}))
    x = np.array([[1.0, -3.0]], np.float32)
    for names, expected in (
        (None, [x + x, x * x]),
        (["squared"], [x * x]),
        (["squared", "doubled"], [x * x, x + x]),
    ):
        results = session.run(names, {"x": x})
        assert len(results) == len(expected)
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, value)


def test_results_are_copies_that_a_later_run_leaves_alone(path: Path) -> None:
    core = open_core("CPU")
    session = OpenVinoSession(compile_model(core, read(core, path), "CPU", {}))
    (first,) = session.run(["doubled"], {"x": np.ones((1, 2), np.float32)})
    session.run(["doubled"], {"x": np.zeros((1, 2), np.float32)})
    np.testing.assert_array_equal(first, np.full((1, 2), 2.0, np.float32))


def test_a_missing_device_names_those_that_are_present() -> None:
    assert "CPU" in present_devices()
    with pytest.raises(ProviderUnavailableError, match=r"GPU\.7.*CPU"):
        open_core("GPU.7")


def test_files_that_are_no_models(tmp_path: Path) -> None:
    core = open_core("CPU")
    with pytest.raises(ModelNotFoundError, match=r"gone\.onnx"):
        read(core, tmp_path / "gone.onnx")
    (tmp_path / "text.onnx").write_text("no protobuf")
    with pytest.raises(GraphError, match=r"text\.onnx"):
        read(core, tmp_path / "text.onnx")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_sums_of_bytes_are_exact(dtype: type[np.integer[Any]], tmp_path: Path) -> None:
    """On x86 processors without VNNI OpenVINO's own sums saturate: two products exceed 16 bits."""
    rng = np.random.default_rng(0)
    largest = np.iinfo(dtype).max
    x = rng.integers(largest - 20, largest, (4, 64)).astype(np.float32)
    w = rng.integers(100, 128, (64, 24)).astype(np.int8)
    arrays = {"one": np.float32(1), "zero": dtype(0), "scales": np.ones(24, np.float32), "w": w}
    constants = [ir.tensor(np.asarray(array), name=name) for name, array in arrays.items()]
    ir.save(ir.from_onnx_text(QUANTIZED, initializers=constants), tmp_path / "quantized.onnx")
    core = open_core("CPU")
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    session = OpenVinoSession(compile_model(core, read(core, tmp_path / "quantized.onnx"), "CPU", settings))
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ w.astype(np.float32), rtol=1e-6)


def test_a_rotary_embedding_that_was_compiled_before_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    ir.save(ir.from_onnx_text(ROTARY), tmp_path / "rotary.onnx")
    rng, core = np.random.default_rng(4), open_core("CPU")
    x, cos, sin = (rng.uniform(-1, 1, (1, 5, size)).astype(np.float32) for size in (16, 4, 4))
    first, second = x.reshape(1, 5, 2, 2, 4).transpose(3, 0, 1, 2, 4)
    c, s = cos[:, :, None], sin[:, :, None]
    expected = np.stack([first * c - second * s, second * c + first * s], axis=3).reshape(x.shape)
    for _ in range(2):
        model = read(core, tmp_path / "rotary.onnx")
        compiled = compile_model(core, model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        (found,) = OpenVinoSession(compiled).run(None, {"x": x, "cos": cos, "sin": sin})
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert list((tmp_path / "cache" / "openvino").iterdir())
