"""Models of all opsets and kinds are optimized, verified and quantized, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

from carryall.cli import carryall

RNG = np.random.default_rng(0)
WEIGHTS = {
    "w": RNG.standard_normal((16, 16, 3, 3)) / 12,
    "b": RNG.standard_normal(16),
    "v": np.full(16, 2.0),
    "k": RNG.standard_normal((1024, 32)) / 32,
    "z": RNG.standard_normal((32, 32)) / 6,
}
X = "(float[N,16,8,8] x)"
CNN = f"""g {X} => (float[N,32] y) {{ c = Conv<pads=[1,1,1,1]>(x, w, b) n = BatchNormalization(c, v, b, b, v)
    r = Relu(n) f = Flatten(r) h = MatMul(f, k) t = Sigmoid(h) y = MatMul(t, z) }}"""
IF = f"""g {X} => (float[N,32] y) {{ c = Conv<pads=[1,1,1,1]>(x, w, b) f = Flatten(c) h = MatMul(f, k)
    q = ReduceSum<keepdims=0>(h) n = Constant<value_float=0.0>() o = Greater(q, n) y = If(o)<
    then_branch = t () => (float[N,32] y1) {{ y1 = MatMul(h, z) }},
    else_branch = e () => (float[N,32] y2) {{ y2 = Neg(h) }}> }}"""
LOOP = f"""g {X} => (float[N,32] y) {{ f = Flatten(x) h = MatMul(f, k) n = Constant<value_int=3>()
    c = Cast<to=9>(n) y = Loop(n, c, h)<
    body = b (int64 i, bool p, float[N,32] a) => (bool q, float[N,32] o) {{ q = Identity(p)
    m = MatMul(a, z) o = Tanh(m) }}> }}"""
SEQUENCE = f"""g {X} => (seq(float[N,16]) s, float[N,32] y) <int64[2] parts = {{16, 16}}> {{
    f = Flatten(x) h = MatMul(f, k) s = SplitToSequence<axis=1>(h, parts)
    y = ConcatFromSequence<axis=1>(s) }}"""
OPTIONAL = f"g {X} => (optional(float[N,32]) y) {{ f = Flatten(x) h = MatMul(f, k) y = Optional(h) }}"
DOMAIN = f"""g {X} => (float[N,32] y) {{ f = Flatten(x) h = com.microsoft.FusedMatMul<alpha=2.0>(f, k)
    a = com.microsoft.Gelu(h) y = MatMul(a, z) }}"""
MAP = f"""g {X} => (seq(map(int64, float)) y) {{ f = Flatten(x) h = MatMul(f, k)
    y = ai.onnx.ml.ZipMap<classlabels_int64s=[{", ".join(map(str, range(32)))}]>(h) }}"""
ONNX, MICROSOFT, CLASSIC = '"" : {}', '"" : 17, "com.microsoft" : 1', '"" : 13, "ai.onnx.ml" : 1'
MODELS = {
    **{f"cnn, opset {opset}": (CNN, ONNX.format(opset)) for opset in (7, 9, 11, 24, 28)},
    "if": (IF, ONNX.format(18)),
    "loop": (LOOP, ONNX.format(13)),
    "sequence": (SEQUENCE, ONNX.format(13)),
    "optional": (OPTIONAL, ONNX.format(18)),
    "another domain": (DOMAIN, MICROSOFT),
    "map": (MAP, CLASSIC),
}
METHODS = ("int8-static", "int8-dynamic", "fp16")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    text, imports = MODELS[request.param]
    proto = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]> {text}")
    weights = [
        onnx.numpy_helper.from_array(np.asarray(one, np.float32), name) for name, one in WEIGHTS.items()
    ]
    proto.graph.initializer.extend(one for one in weights if f"{one.name})" in text or f"{one.name}," in text)
    onnx.save(proto, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.long
def test_it_is_optimized_verified_and_quantized(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(carryall, [*map(str, arguments)])
        assert isinstance(result.exception, SystemExit | None), result.exception
        return "" if result.exit_code == 0 else result.stderr

    for target in ("portable", "cpu"):
        out = tmp_path / f"{target}.onnx"
        assert run("optimize", model, out, "--target", target, "--verify") == ""
        onnxruntime.InferenceSession(out)
    assert run("inspect", model) == ""
    for method in METHODS:
        out = tmp_path / f"{method}.onnx"
        error = run("quantize", model, out, "--method", method)
        if "map" in request.node.name:
            assert "has maps (y)" in error
            continue
        assert error == ""
        onnxruntime.InferenceSession(out)
