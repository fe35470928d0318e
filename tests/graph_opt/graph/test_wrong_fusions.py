"""Sessions compute norms and quantized pairs as written, where onnxruntime's fusions would change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.graph_opt.compare.verify import verify
from carryall.graph_opt.graph.session import open_session
from carryall.graph_opt.graph.wrong_fusions import ENTRY, wrong_fusions
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes
from carryall.providers import get_provider
from carryall.providers.ort import ort
from carryall.runtime.api.session import InferenceSession

onnxruntime = pytest.importorskip("onnxruntime")
Array = npt.NDArray[Any]
RNG = np.random.default_rng(0)
X = (3 * RNG.standard_normal((4, 4)) + 1).astype(np.float32)
SCALES: dict[str, Any] = {
    "two": np.float32(2), "three": np.float32(3), "one": np.float32(1), "e": np.float32(1e-5),
    "s": RNG.standard_normal(4).astype(np.float32), "b": RNG.standard_normal(4).astype(np.float32),
    "last": np.array([-1]), "first": np.array([0]),
}  # fmt: skip


def norm(
    *,
    centred: bool = True,
    keep: tuple[int, int] = (1, 1),
    axes: tuple[str, str] = ("last", "last"),
    exponent: str = "two",
    difference: str = "x, m",
    division: str = "n = Div(c, r)",
) -> ir.Model:
    centre = f"m = ReduceMean<keepdims = {keep[0]}>(x, {axes[0]}) c = Sub({difference})"
    body = f"""{centre if centred else "c = Identity(x)"} q = Pow(c, {exponent})
        v = ReduceMean<keepdims = {keep[1]}>(q, {axes[1]}) w = Add(v, e) r = Sqrt(w) {division}
        p = Mul(n, s) y = Add(p, b)"""
    return model(body)


def model(body: str, **more: Any) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["" : 18]> g (float[4, 4] x) => (float[4, 4] y) {{ {body} }}'
    names = _words(body.split("<\n")[0])
    arrays = {name: array for name, array in (SCALES | more).items() if name in names}
    return ir.from_onnx_text(text, initializers=[ir.tensor(a, name=name) for name, a in arrays.items()])


def _words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() else " " for c in text).split())


def as_written(given: ir.Model) -> Array:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(given).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": X})[0])


def fused_operators(path: Path, folder: Path) -> set[str]:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return {node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node}


WRONG = {
    "a mean that drops its axis": norm(keep=(0, 1)),
    "a variance that drops its axis": norm(keep=(1, 0)),
    "both": norm(keep=(0, 0)),
    "the opposite difference": norm(difference="m, x"),
    "another exponent": norm(exponent="three"),
    "another axis": norm(axes=("first", "last")),
    "the inverse": norm(division="n = Div(r, c)"),
    "a reciprocal": norm(keep=(0, 1), division="i = Div(one, r) n = Mul(c, i)"),
    "a root mean square that drops its axis": norm(centred=False, keep=(1, 0)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_norm_of_another_form_is_computed_as_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ir.save(WRONG[name], path)
    expected = as_written(WRONG[name])
    for session in (
        InferenceSession(path),
        InferenceSession(WRONG[name], providers=["cpu"]),
        ort.open_session(path, ort.CPU),
        open_session(path),
    ):
        np.testing.assert_allclose(session.run(None, {"x": X})[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WRONG)
def test_verify_refuses_the_norm_that_onnxruntime_would_fuse_it_to(name: str) -> None:
    if np.allclose(as_written(WRONG[name]), as_written(norm()), rtol=1e-2):
        pytest.skip("equal on square inputs")
    assert not verify(WRONG[name], norm(), names=("A", "B")).passed


@pytest.mark.parametrize(
    ("given", "operator"),
    [
        (norm(), "LayerNormalization"),
        (norm(division="i = Div(one, r) n = Mul(c, i)"), "LayerNormalization"),
        (norm(centred=False), "SimplifiedLayerNormalization"),
    ],
)
def test_exact_norms_are_still_fused(given: ir.Model, operator: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ir.save(given, path)
    assert wrong_fusions(path) == ()
    assert operator in fused_operators(path, tmp_path)
    np.testing.assert_allclose(
        InferenceSession(path).run(None, {"x": X})[0], as_written(given), rtol=1e-5, atol=1e-5
    )


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    centred=st.booleans(),
    keep=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    axes=st.tuples(st.sampled_from(["last", "first"]), st.sampled_from(["last", "first"])),
    exponent=st.sampled_from(["two", "two", "three", "one"]),
    difference=st.sampled_from(["x, m", "x, m", "m, x"]),
    division=st.sampled_from(
        ["n = Div(c, r)", "n = Div(r, c)", "i = Reciprocal(r) n = Mul(c, i)", "i = Div(one, r) n = Mul(c, i)"]
    ),
)
def test_any_norm_is_computed_as_written(**details: Any) -> None:
    given = norm(**details)
    found = InferenceSession(given).run(None, {"x": X})[0]
    np.testing.assert_allclose(found, as_written(given), rtol=1e-3, atol=1e-4)


PAIR = """q = QuantizeLinear(x, u, z) d = DequantizeLinear(q, u, z) {}
    t = QuantizeLinear({}, w, z) y = DequantizeLinear(t, w, z)"""
U: dict[str, Any] = {"u": np.float32(0.05), "z": np.uint8(3)}


@pytest.mark.parametrize(
    "between", ["", "i = Identity(d)", "i = Mul(d, one)", "j = Cast<to = 1>(d) i = Dropout(j)"]
)
def test_unequal_pairs_in_a_row_are_computed_as_written(between: str) -> None:
    given = model(PAIR.format(between, "i" if between else "d"), **U, w=np.float32(0.1))
    assert wrong_fusions(ir.to_proto(given).SerializeToString()) == ("DoubleQDQPairsRemover",)
    np.testing.assert_array_equal(InferenceSession(given).run(None, {"x": X})[0], as_written(given))


def test_equal_pairs_and_others_need_nothing() -> None:
    equal = model(PAIR.format("", "d"), **U, w=np.float32(0.05))
    other = model(PAIR.format("i = Relu(d)", "i"), **U, w=np.float32(0.1))
    assert [wrong_fusions(ir.to_proto(given).SerializeToString()) for given in (equal, other)] == [(), ()]


def test_what_the_caller_disables_stays_disabled(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(ENTRY, "MatMulAddFusion")
    InferenceSession(WRONG["both"], options)
    names = options.get_session_config_entry(ENTRY).split(";")
    assert names[0] == "MatMulAddFusion"
    assert "LayerNormFusionL1" in names


def test_norms_in_branches_are_found_with_their_constant_nodes() -> None:
    inner = """last = Constant<value_ints = [-1]>() e = Constant<value_float = 1e-5>()
        m = ReduceMean<keepdims = 0>(x, last) c = Sub(x, m) q = Mul(c, c) v = ReduceMean(q, last)
        w = Add(v, e) r = Sqrt(w) n = Div(c, r)"""
    given = model(
        f"""k = ReduceSum<keepdims = 0>(x) t = Greater(k, one) y = If(t) <
        then_branch = a () => (float[4, 4] n) {{ {inner} }},
        else_branch = b () => (float[4, 4] o) {{ o = Identity(x) }}>"""
    )
    assert "LayerNormFusionL1" in wrong_fusions(ir.to_proto(given).SerializeToString())
    kept = ir.from_proto(ir.to_proto(given))
    for node in kept.graph.all_nodes():
        if node.op_type == "ReduceMean":
            node.attributes.pop("keepdims", None)
    assert wrong_fusions(ir.to_proto(kept).SerializeToString()) == ()


@pytest.mark.parametrize(
    "content", [b"", b"ReduceMean Sqrt", b"\x3a\xff\xff\xff\x0fReduceMean Sqrt", b"\x00ReduceMeanSqrt"]
)
def test_what_is_no_onnx_needs_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    assert wrong_fusions(content) == ()
    assert wrong_fusions(tmp_path / "model.onnx") == ()


def test_large_weights_are_not_read(tmp_path: Path) -> None:
    """The content of a weight that looks like a broken message is skipped."""
    given = WRONG["both"]
    noise = ir.tensor(np.full(1 << 16, 0xFF, np.uint8), name="noise")
    given = ir.from_proto(ir.to_proto(given))
    given.graph.register_initializer(
        ir.Value(name="noise", type=ir.TensorType(noise.dtype), shape=ir.Shape([1 << 16]), const_value=noise)
    )
    ir.save(given, tmp_path / "model.onnx")
    assert "LayerNormFusionL1" in wrong_fusions(tmp_path / "model.onnx")


def signed_pair(body: str, *, opset: int = 21, typed: str = "") -> ir.Model:
    text = f"""<ir_version: 10, opset_import: ["" : {opset}]> g (float[2, 4] x) => (float[M, N] y) {{
        q = QuantizeLinear{typed}(x, scale, zero) d = DequantizeLinear(q, scale, zero) {body} }}"""
    arrays: dict[str, Any] = {"scale": np.float32(0.05), "zero": np.int8(3)}
    arrays |= {"shape": np.array([4, 2])} if "shape" in body else {}
    return ir.from_onnx_text(text, initializers=[ir.tensor(a, name=name) for name, a in arrays.items()])


@pytest.mark.parametrize(
    ("typed", "body"),
    [
        ("<output_dtype = 3>", "y = Add(d, d)"),
        ("<output_dtype = 3>", "t = Reshape(d, shape) y = Add(t, t)"),
        ("", "t = Transpose<perm = [1, 0]>(d) y = Add(t, t)"),
        ("<output_dtype = 3>", "t = Transpose<perm = [1, 0]>(d) y = Add(t, t)"),
    ],
)
def test_int8_with_a_stated_type_opens_and_is_computed_as_written(typed: str, body: str) -> None:
    source = signed_pair(body, typed=typed)
    x = RNG.standard_normal((2, 4)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(source).SerializeToString()
    plain = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (expected,), (result,) = (
        plain.run(None, {"x": x}),
        InferenceSession(source, providers=["cpu"]).run(None, {"x": x}),
    )
    np.testing.assert_array_equal(result, expected)


def test_int8_of_older_opsets_is_still_turned_to_uint8() -> None:
    body = "t = Transpose<perm = [1, 0]>(d) y = Add(t, t)"
    of_opset = {
        opset: wrong_fusions(ir.to_proto(signed_pair(body, opset=opset)).SerializeToString())
        for opset in (19, 21)
    }
    assert of_opset == {19: (), 21: ("QDQS8ToU8Transformer",)}


@pytest.mark.parametrize("target", ["source", "portable", "cpu"])
@pytest.mark.parametrize("inner", [64, 256])
def test_a_transposed_int8_weight_stays_a_product_of_floats(target: str, inner: int) -> None:
    """Folded, it would become a product that rounds its activations: 0.5 % off."""
    rng = np.random.default_rng(0)
    stored, scale = rng.integers(-127, 127, (32, inner)).astype(np.int8), np.full(32, 0.01, np.float32)
    source = ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 18]> g (float[n, {inner}] x) => (float[n, 32] y) {{
        w = DequantizeLinear<axis = 0>(stored, scale) t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) }}""",
        initializers=[ir.tensor(stored, name="stored"), ir.tensor(scale, name="scale")],
    )
    provider = get_provider("cpu")
    passes = {
        "source": [],
        "portable": model_passes(),
        "cpu": model_passes(provider.model_passes(), provider.kept_products()),
    }
    model, _ = run(source, passes[target])
    x = rng.standard_normal((2, inner)).astype(np.float32)
    expected = x.astype(np.float64) @ (stored.astype(np.float64) * 0.01).T
    content = ir.to_proto(model).SerializeToString()
    plain = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for session in (plain, InferenceSession(content, providers=["cpu"])):
        (result,) = session.run(None, {"x": x})
        assert np.abs(result - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_weights_that_are_quantized_in_the_graph_may_share_a_zero_point(opset: int) -> None:
    """The form of quantization-aware training; with exact sums onnxruntime would not open it."""
    text = f"""<ir_version: 10, opset_import: ["" : {opset}]> g (float[3, 4] x) => (float[3, 5] y) {{
        xq = QuantizeLinear(x, scale, zero) xd = DequantizeLinear(xq, scale, zero)
        vq = QuantizeLinear(v, scale, zero) vd = DequantizeLinear(vq, scale, zero)
        wq = QuantizeLinear(w, scale, zero) wd = DequantizeLinear(wq, scale, zero)
        m = MatMul(xd, vd) mq = QuantizeLinear(m, scale, zero) md = DequantizeLinear(mq, scale, zero)
        y = MatMul(md, wd) }}"""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "scale": np.float32(0.02),
        "zero": np.int8(0),
        "v": rng.standard_normal((4, 6)).astype(np.float32),
        "w": rng.standard_normal((6, 5)).astype(np.float32),
    }
    source = ir.from_onnx_text(text, initializers=[ir.tensor(a, name=name) for name, a in arrays.items()])
    x = rng.standard_normal((3, 4)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(source).SerializeToString()
    plain = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (expected,) = plain.run(None, {"x": x})
    (result,) = InferenceSession(source, providers=["cpu"]).run(None, {"x": x})
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "disabled"), [("float", ()), ("double", ("FuseReluClip",))])
def test_bounds_of_other_types_stay_behind_relu(dtype: str, disabled: tuple[str, ...]) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 18]> g ({dtype}[4] x) => ({dtype}[4] y)
        <{dtype} low = {{-1}}> {{ r = Relu(x) y = Clip(r, low) }}"""
    assert wrong_fusions(onnx.parser.parse_model(text).SerializeToString()) == disabled
