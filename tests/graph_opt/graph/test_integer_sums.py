"""8-bit sums are exact in onnxruntime on every processor, also on those whose kernels saturate."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from carryall.graph_opt.graph.integer_sums import exact_sums
from carryall.graph_opt.graph.session import open_session
from carryall.providers.ort import ort
from carryall.runtime.api.session import InferenceSession

Array = npt.NDArray[Any]

# Two products 255 x 127 or 127 x 127 exceed 16 bits: in most sums of 64, and all of one sign.
X = np.random.default_rng(0).integers(200, 256, (4, 64)).astype(np.uint8)
W = np.random.default_rng(1).integers(100, 128, (64, 24)).astype(np.int8)
ONES = np.ones(24, np.float32)
INPUT = "uint8[4, 64] x"
INTEGER = "y = MatMulInteger(x, w)"
SHARED = "a = MatMulInteger(x, w) b = MatMulInteger(x, w) y = Add(a, b)"
LINEAR = "q = QLinearMatMul(x, one, zero, w, ones, zeros, thousand, zero) y = Cast<to = 6>(q)"
# The product of two dequantized tensors, which onnxruntime fuses to one of integers.
WEIGHT = "d = DequantizeLinear(x, one, zero) v = DequantizeLinear<axis = 1>(w, ones{}) "
FUSED = """p = MatMul(d, v) s = QuantizeLinear(p, thousand, zero) f = DequantizeLinear(s, one, zero)
    y = Cast<to = 6>(f)"""
TIED = "r = ReduceMax<keepdims = 0>(v) "  # the dequantized weight has a second reader


def model(body: str) -> ir.Model:
    arrays = {
        "w": W, "ones": ONES, "zeros": np.zeros(24, np.int8),
        "one": np.float32(1), "thousand": np.float32(8000), "zero": np.uint8(0),
    }  # fmt: skip
    used = {
        name: ir.tensor(np.asarray(array), name=name)
        for name, array in arrays.items()
        if name in re.findall(r"\w+", body)
    }
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({INPUT}) => (int32 y) {{ {body} }}'
    return ir.from_onnx_text(text, initializers=list(used.values()))


SUMS = X.astype(np.int32) @ W.astype(np.int32)
ROUNDED = np.rint(SUMS / 8000).astype(np.int32)
CASES = {
    "integers": (INTEGER, SUMS),
    "a shared weight": (SHARED, 2 * SUMS),
    "linear": (LINEAR, ROUNDED),
    "dequantized": (WEIGHT.format("") + FUSED, ROUNDED),
    "with zero points": (WEIGHT.format(", zeros") + FUSED, ROUNDED),
    "two readers": (WEIGHT.format("") + TIED + FUSED, ROUNDED),
    "shared zero points": (
        WEIGHT.format(", zeros") + "u = DequantizeLinear<axis = 1>(w, ones, zeros) " + FUSED,
        ROUNDED,
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Array]:
    body, expected = CASES[request.param]
    ir.save(model(body), tmp_path / "model.onnx", external_data="weights.bin", size_threshold_bytes=0)
    return tmp_path / "model.onnx", expected


def test_sums_are_exact_wherever_a_session_is_opened(case: tuple[Path, Array]) -> None:
    path, expected = case
    for session in (
        ort.open_session(path, ort.CPU),
        InferenceSession(path, providers=["cpu"]),
        InferenceSession(onnx.load(path), providers=["cpu"]),
        open_session(path),
    ):
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)


CONTRIB = {
    "MatMulIntegerToFloat": "com.microsoft.MatMulIntegerToFloat(x, {w}, one, one, zero, {z})",
    "DynamicQuantizeMatMul": "com.microsoft.DynamicQuantizeMatMul(f, {w}, one, {z})",
    "QGemm": "com.microsoft.QGemm(x, one, zero, {w}, one, {z})",
    "DynamicQuantizeLSTM": """com.microsoft.DynamicQuantizeLSTM<hidden_size = 6>(
        f3, {w}3, {w}r, , , , , , small, {z}1, small, {z}1)""",
}


@pytest.mark.parametrize("op_type", CONTRIB)
def test_operators_of_onnxruntime_may_share_zero_points(op_type: str, tmp_path: Path) -> None:
    """Two weights with one zero point, as after merging equal constants."""
    first, second = np.random.default_rng(2).integers(-127, 128, (2, 64, 24)).astype(np.int8)
    arrays: dict[str, Any] = {
        "one": np.float32(1),
        "zero": np.uint8(0),
        "small": np.full(1, 0.01, np.float32),
    }
    for name, weights in (("a", first), ("b", second)):
        arrays |= {name: weights, f"{name}3": weights[None], f"{name}r": weights[None, :6]}

    def write(path: Path, arrays: dict[str, Any]) -> Path:
        body = " ".join(
            f"{result} = {CONTRIB[op_type].format(w=w, z='z')}" for result, w in (("p", "a"), ("q", "b"))
        )
        text = f"""<ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]> g (uint8[4, 64] x)
            => (float y) <int64[3] s = {{1, 4, 64}}>
            {{ f = Cast<to = 1>(x) f3 = Reshape(f, s) {body} y = Add(p, q) }}"""
        used = set(re.findall(r"\w+", body))
        tensors = [ir.tensor(np.asarray(array), name=name) for name, array in arrays.items() if name in used]
        ir.save(ir.from_onnx_text(text, initializers=tensors), path)
        return path

    middle = np.uint8(128)
    unsigned = {
        name: array.view(np.uint8) ^ middle if array.dtype == np.int8 else array
        for name, array in arrays.items()
    }
    exact = write(tmp_path / "u8.onnx", {**unsigned, "z": middle, "z1": np.full(1, middle)})
    path = write(tmp_path / "s8.onnx", {**arrays, "z": np.int8(0), "z1": np.zeros(1, np.int8)})
    expected = onnxruntime.InferenceSession(exact, providers=["CPUExecutionProvider"]).run(None, {"x": X})[0]
    for session in (ort.open_session(path, ort.CPU), open_session(path)):
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)


def test_the_file_stays_and_no_weight_is_copied(case: tuple[Path, Array]) -> None:
    path, _ = case
    before = path.read_bytes()
    source, entries = exact_sums(path)
    assert path.read_bytes() == before
    assert entries["session.x64quantprecision"] == "1"
    assert isinstance(source, bytes) == ("session.model_external_initializers_file_folder_path" in entries)


def test_graphs_without_integer_products_are_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ir.save(
        model(
            "v = DequantizeLinear<axis = 1>(w, ones) d = Cast<to = 1>(x) p = MatMul(d, v) y = Cast<to = 6>(p)"
        ),
        path,
    )
    assert exact_sums(path) == (str(path), {})
    assert exact_sums(path.read_bytes()) == (path.read_bytes(), {})


@pytest.mark.parametrize("content", [b"", b"QuantizeLinear", b"\x00ORTM QuantizeLinear"])
def test_what_is_no_onnx_is_left_to_onnxruntime(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    assert exact_sums(tmp_path / "model.onnx") == (str(tmp_path / "model.onnx"), {})
    assert exact_sums(content) == (content, {})


def test_other_processors_need_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    content = ir.to_proto(model(INTEGER)).SerializeToString()
    assert exact_sums(content) == (content, {})


def test_onnxruntime_still_needs_the_entry() -> None:
    """If this fails on a processor without VNNI, onnxruntime has changed and the module may go."""
    content = ir.to_proto(model(INTEGER)).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": X})[0]
    if np.array_equal(found, SUMS):
        pytest.skip("this processor does not saturate")
    assert (found < SUMS).any()
