"""Quantization of whole models: size, error, report and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from graph_asserts import evaluate, graph

from carryall.errors import GraphError, UsageError
from carryall.graph_opt.graph.integer_sums import exact_sums, saturates
from carryall.graph_opt.quantize.any_model.grid import grid
from carryall.graph_opt.quantize.any_model.layers import find_layers
from carryall.graph_opt.quantize.any_model.options import IntegerOptions
from carryall.graph_opt.quantize.any_model.quantize import quantize_dynamic, quantize_static
from carryall.graph_opt.quantize.any_model.ranges import Range, grids, value_ranges
from carryall.graph_opt.quantize.any_model.report import output_fidelity
from carryall.graph_opt.quantize.any_model.samples import (
    GeneratedSamplesWarning,
    Samples,
    checked_samples,
)
from carryall.graph_opt.quantize.any_model.search import dominant
from carryall.graph_opt.quantize.any_model.static import StaticGraphPass, quantized_values
from carryall.graph_opt.quantize.any_model.switches import output_noise
from carryall.graph_opt.quantize.any_model.twin import dynamic_errors, static_errors

Array = npt.NDArray[Any]
NET = """g (float[N,3,16,16] x) => (float[N,10] y) {
    c = Conv<pads=[1,1,1,1]>(x, w1, b1) n = BatchNormalization(c, g, s, m, v) r = Relu(n)
    d = Conv<pads=[1,1,1,1], group=16>(r, w2, b2) t = Sigmoid(d) e = Mul(d, t) h = Conv(e, w3)
    a = Add(h, r) k = Conv<strides=[2,2]>(a, w4, b4) p = GlobalAveragePool(k) f = Flatten(p)
    l = MatMul(f, w5) o = Add(l, b5) y = Gemm<transB=1>(o, w6, b6) }"""


def weights(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        found: Array = (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        return found

    found = {"w1": normal(16, 3, 3, 3), "w2": normal(16, 1, 3, 3), "w3": normal(16, 16, 1, 1)}
    found |= {"w4": normal(32, 16, 3, 3), "w5": normal(32, 24), "w6": normal(10, 24)}
    found |= {"b1": normal(16), "b2": normal(16), "b4": normal(32), "b5": normal(24), "b6": normal(10)}
    found |= {"g": 1 + normal(16), "s": normal(16), "m": normal(16), "v": 1 + np.abs(normal(16))}
    return found


def net(**changes: Array) -> ir.Model:
    return graph(NET, **{**weights(), **changes})


def samples(count: int = 8, scale: float = 1.0) -> Samples:
    rng = np.random.default_rng(1)
    feeds = [{"x": scale * rng.standard_normal((2, 3, 16, 16)).astype(np.float32)} for _ in range(count)]
    return checked_samples(net().graph, feeds)


def run(model: ir.Model, feed: Mapping[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    source, entries = exact_sums(proto.SerializeToString())
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return [np.asarray(one) for one in session.run(None, dict(feed))]


def snr(exact: Array, found: Array) -> float:
    return float(10 * np.log10((exact**2).sum() / ((exact - found) ** 2).sum()))


@pytest.mark.long
@pytest.mark.parametrize("method", [quantize_static, quantize_dynamic])
def test_results_are_near_and_both_evaluators_agree(method: Any) -> None:
    feed = {"x": np.random.default_rng(5).standard_normal((2, 3, 16, 16)).astype(np.float32)}
    exact = run(net(), feed)[0]
    model, report = method(net(), samples(), IntegerOptions(convolutions=True, skip_slow=False))
    found, reference = run(model, feed)[0], evaluate(model, feed)[0]
    assert snr(exact, found) > 30
    assert snr(exact, reference) > 30
    assert set(report.layer_errors) == {"w1", "w2", "w3", "w4", "w5", "w6"} - set(report.left_float)
    assert abs(report.outputs["y"].snr - snr(exact, found)) < 8
    assert report.bytes_after < 0.45 * report.bytes_before
    assert report.outputs["y"].cosine > 0.999
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert [str(value.shape) for value in model.graph.inputs] == ["[N,3,16,16]"]
    assert "SNR" in str(report)
    assert report.to_dict()["outputs"]["y"]["snr"] == report.outputs["y"].snr


@pytest.mark.long
@pytest.mark.parametrize("activations", ["uint8", "int8"])
@pytest.mark.parametrize("calibrator", ["minmax", "percentile", "entropy", "mse"])
def test_every_calibrator_and_both_kinds_of_activations(calibrator: str, activations: str) -> None:
    options = IntegerOptions(calibrator=calibrator, activations=activations)
    model, report = quantize_static(net(), samples(), options)
    assert report.calibrator == calibrator
    assert report.outputs["y"].snr > 22
    kinds = {
        node.inputs[2].dtype for node in model.graph if node.op_type == "QuantizeLinear" and node.inputs[2]
    }
    assert kinds == {ir.DataType.UINT8 if activations == "uint8" else ir.DataType.INT8}


def test_few_layers_that_make_most_of_the_error_are_found() -> None:
    noise = {"a": 8.0, "b": 4.0, **{f"c{number}": 0.1 for number in range(18)}}
    assert dominant(noise, 0.1) == ["a", "b"]
    assert dominant(noise, 0.05) == ["a"]
    assert dominant(noise, 0.0) == []
    assert dominant(dict.fromkeys(map(str, range(20)), 1.0), 1.0) == []


def test_a_layer_with_a_large_output_error_stays_float() -> None:
    arrays = weights()
    arrays["w6"] = arrays["w6"].copy()
    arrays["w6"][:, 0] *= 300  # the output depends almost only on one input's noise
    exact = IntegerOptions(calibrator="minmax", max_error=None, float_share=0.0)
    plain = quantize_static(graph(NET, **arrays), samples(), exact)[1]
    shared = replace(exact, float_share=0.5)
    spared = quantize_static(graph(NET, **arrays), samples(), shared)[1]
    reasons = set(spared.left_float.values()) - set(plain.left_float.values())
    assert reasons <= {"it alone causes much of the outputs' error"}
    assert spared.outputs["y"].snr >= plain.outputs["y"].snr


@pytest.mark.long
def test_auto_is_at_least_as_near_as_any_calibrator_on_what_it_saw() -> None:
    found = [
        quantize_static(net(), samples(3), IntegerOptions(calibrator=calibrator))[1].outputs["y"].snr
        for calibrator in ("auto", "minmax", "percentile", "entropy", "mse")
    ]
    assert found[0] == pytest.approx(max(found), abs=1e-6)


@pytest.mark.long
def test_layers_above_the_error_limit_stay_float() -> None:
    spiky = weights()["w4"].copy()
    spiky[:, 0] *= 400  # one input channel uses all levels
    a = net(w4=spiky)
    errors = quantize_static(a, samples(), IntegerOptions(calibrator="minmax", max_error=None))[
        1
    ].layer_errors
    bar = sorted(errors.values())[-2] * 1.001
    worst = max(errors, key=errors.__getitem__)
    model, report = quantize_static(
        net(w4=spiky), samples(), IntegerOptions(calibrator="minmax", max_error=bar)
    )
    assert report.left_float[worst] == f"its error is above {100 * bar:g} %"
    assert worst in model.graph.initializers
    assert worst not in report.layer_errors


def test_min_snr_restores_float_layers() -> None:
    plain = quantize_static(net(), samples(), IntegerOptions(calibrator="minmax"))[1]
    reached = plain.outputs["y"].snr
    _, report = quantize_static(net(), samples(), IntegerOptions(calibrator="minmax", min_snr=reached + 4))
    assert report.outputs["y"].snr > reached
    more = set(report.left_float) - set(plain.left_float)
    assert more
    assert {report.left_float[name] for name in more} == {
        f"the outputs would not reach {reached + 4:g} dB with it quantized"
    }
    unreachable = quantize_static(net(), samples(), IntegerOptions(calibrator="minmax", min_snr=150))[1]
    assert "warning: no selection of layers reaches an SNR of 150 dB" in unreachable.notes


def test_corrected_biases_have_no_mean_error(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    text = "g (float[N,8] x) => (float[N,4] y) { m = MatMul(x, w) y = Add(m, b) }"
    model = graph(text, w=w, b=np.zeros(4, np.float32))
    ir.save(model, tmp_path / "float.onnx")
    x = np.random.default_rng(1).uniform(0, 1, (500, 8)).astype(np.float32)
    clipped = {"x": grid(0, 0.8, ir.DataType.UINT8)}  # clips, so that the errors' mean is not zero
    before = static_errors(tmp_path / "float.onnx", [{"x": x}], clipped)["w"]
    exact, shift = x @ w, before.shifts["y"]
    after = static_errors(tmp_path / "float.onnx", [{"x": x}], clipped, biases={"y": shift})["w"]
    assert np.abs(shift).max() > 0.01
    assert np.abs(after.shifts["y"]).max() < 1e-3
    assert after.relative < before.relative
    levels = np.round(np.clip(x, 0, 0.8) * 255 / 0.8) * (0.8 / 255)
    scales = np.abs(w).max(0) / 127
    expected = np.linalg.norm(levels @ (np.round(w / scales) * scales) - exact) / np.linalg.norm(exact)
    assert before.relative == pytest.approx(expected, rel=1e-3)


def test_dynamic_errors_are_those_of_the_layers_alone(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    text = "g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) r = Relu(a) y = MatMul(r, v) }"
    ir.save(graph(text, w=w, v=np.eye(8, dtype=np.float32)), tmp_path / "float.onnx")
    x = np.random.default_rng(1).standard_normal((500, 8)).astype(np.float32)
    errors = dynamic_errors(tmp_path / "float.onnx", [{"x": x}], ["MatMul"])
    exact = np.maximum(x @ w, 0)
    step = exact.max() / 255
    expected = np.linalg.norm(np.round(exact / step) * step - exact) / np.linalg.norm(exact)
    assert errors["v"].relative == pytest.approx(expected, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("method", [quantize_static, quantize_dynamic])
def test_zero_channels_constant_activations_and_outliers(method: Any) -> None:
    w1, w5 = weights()["w1"].copy(), weights()["w5"].copy()
    w1[3], w5[:, 0], w5[5, 5] = 0, 0, 1e4
    options = IntegerOptions(skip_slow=False, max_error=None)
    feeds = [{"x": np.full((1, 3, 16, 16), 0.7, np.float32)}] * 2
    model, _ = method(net(w1=w1, w5=w5), checked_samples(net().graph, feeds), options)
    y = run(model, feeds[0])[0]
    exact = run(net(w1=w1, w5=w5), feeds[0])[0]
    assert np.isfinite(y).all()
    assert snr(exact, y) > 20
    zeros = [{"x": np.zeros((1, 3, 16, 16), np.float32)}] * 2
    model, _ = method(net(), checked_samples(net().graph, zeros), options)
    assert np.isfinite(run(model, zeros[0])[0]).all()


def test_percentile_ignores_an_outlier() -> None:
    seen, values = Range(), np.random.default_rng(0).uniform(-1, 1, 100_000).astype(np.float32)
    seen.add(values)
    seen.add(np.array([1e6], np.float32))
    assert seen.grid("minmax", ir.DataType.UINT8).scale > 1000
    tight = seen.grid("mse", ir.DataType.UINT8)
    assert tight.scale > 0
    assert seen.grid("percentile", ir.DataType.UINT8).scale < 0.5 * 1e6 / 8192


@pytest.mark.parametrize("low", [0.0, -0.25, -1.0])
@pytest.mark.parametrize("calibrator", ["minmax", "percentile", "entropy", "mse"])
def test_unsigned_ranges_use_all_levels(low: float, calibrator: str) -> None:
    seen = Range()
    seen.add(np.random.default_rng(0).uniform(low, 1, 50_000).astype(np.float32))
    found = seen.grid(calibrator, ir.DataType.UINT8)
    assert found.scale == pytest.approx((1 - low) / 255, rel=0.02)
    assert found.zero_point == pytest.approx(-low / found.scale, abs=1)


def test_the_mse_range_has_the_least_error() -> None:
    values = np.random.default_rng(0).laplace(0, 1, 100_000).astype(np.float32)
    values = np.where(values < 0, 0.1 * values, values).astype(np.float32)
    seen = Range()
    seen.add(values)
    errors = {}
    for calibrator in ("minmax", "mse"):
        errors[calibrator] = float(
            ((seen.grid(calibrator, ir.DataType.UINT8).round(values) - values) ** 2).sum()
        )
    shrunk = [
        grid(-0.9 * share, values.max() * share, ir.DataType.UINT8) for share in np.linspace(0.2, 1, 60)
    ]
    best = min(float(((one.round(values) - values) ** 2).sum()) for one in shrunk)
    assert errors["mse"] < 0.9 * errors["minmax"]
    assert errors["mse"] < 1.05 * best


def test_nan_weights_are_refused() -> None:
    w3 = weights()["w3"].copy()
    w3[0, 0] = np.inf
    with pytest.raises(
        GraphError, match=r"value \S+ of the float model holds NaN or infinity on calibration"
    ):
        quantize_static(net(w3=w3), samples(), IntegerOptions())


@pytest.mark.parametrize("method", [quantize_static, quantize_dynamic])
def test_quantized_and_unsupported_models_are_refused(method: Any) -> None:
    model, _ = method(net(), samples(), IntegerOptions(calibrator="minmax"))
    with pytest.raises(UsageError, match="the model is already quantized"):
        method(model, samples(), IntegerOptions())
    plain = graph("g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }")
    with pytest.raises(UsageError, match="nothing in the model can be quantized: it has no Conv"):
        method(plain, checked_samples(plain.graph, [{"x": np.ones((1, 4))}]), IntegerOptions())


def test_generated_samples_are_reported() -> None:
    with pytest.warns(GeneratedSamplesWarning):
        _, report = quantize_static(net(), options=IntegerOptions(calibrator="minmax"))
    assert any("no samples were given" in note for note in report.notes)
    assert report.samples == "8 random samples"


@pytest.mark.parametrize("opset", [9, 12, 13, 17])
def test_older_opsets(opset: int) -> None:
    text = """g (float[N,16,8,8] x) => (float[N,16,8,8] y) { c = Conv<pads=[1,1,1,1]>(x, w, b) r = Relu(c)
        d = Conv(r, v) y = Add(d, x) }"""
    rng = np.random.default_rng(0)
    tensors = {"w": rng.standard_normal((16, 16, 3, 3)), "b": rng.standard_normal(16)}
    tensors["v"] = rng.standard_normal((16, 16, 1, 1))
    model = ir.from_onnx_text(
        f'<ir_version: 8, opset_import: ["" : {opset}]> {text}',
        initializers=[ir.tensor(array.astype(np.float32), name=name) for name, array in tensors.items()],
    )
    feeds = [{"x": rng.standard_normal((1, 16, 8, 8)).astype(np.float32)} for _ in range(4)]
    found, report = quantize_static(model, Samples(feeds, "noise"), IntegerOptions(calibrator="minmax"))
    assert found.opset_imports[""] == 18
    assert report.outputs["y"].snr > 30
    run(found, feeds[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"calibrator": "max"}, "unknown calibrator 'max'; the calibrators are: auto, minmax"),
        ({"activations": "int4"}, "activations must be uint8 or int8, found 'int4'"),
        ({"float_share": 1.5}, "float_share must be between 0 and 1, found 1.5"),
        ({"max_error": 0.0}, "max_error must be above 0"),
    ],
)
def test_options_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        IntegerOptions(**given)


def test_fidelity_is_that_of_all_samples_together() -> None:
    exact = [{"y": np.array([3.0, 0.0])}, {"y": np.array([0.0, 4.0])}]
    found = [{"y": np.array([3.0, 0.5])}, {"y": np.array([0.0, 4.0])}]
    one = output_fidelity(exact, found)["y"]
    assert one.snr == pytest.approx(20.0)
    assert one.cosine == pytest.approx(25 / (5 * np.sqrt(25.25)))
    assert one.max_error == pytest.approx(0.125)
    assert output_fidelity(exact, exact)["y"].snr == 200
    assert output_fidelity([{"y": np.array([1])}], [{"y": np.array([2])}]) == {}


def test_layer_noise_equals_quantizing_only_this_layer(tmp_path: Path) -> None:
    model, feeds = net(), samples(2).feeds
    ir.save(model, tmp_path / "float.onnx")
    names = quantized_values(model.graph, carried=())
    found = grids(value_ranges(tmp_path / "float.onnx", names, feeds), "minmax", ir.DataType.UINT8)
    noise = output_noise(tmp_path / "float.onnx", feeds, found)
    weights = {layer.name for layer in find_layers([model.graph])[0]}
    assert set(noise) == weights
    exact = [run(ir.load(tmp_path / "float.onnx"), feed)[0] for feed in feeds]
    for name in weights:
        alone = ir.load(tmp_path / "float.onnx")
        StaticGraphPass(found, exclude=weights - {name}, carried=())(alone)
        pairs = [(y, run(alone, feed)[0]) for y, feed in zip(exact, feeds, strict=True)]
        error = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
        assert noise[name] == pytest.approx(error / sum(float((a**2).sum()) for a, _ in pairs), rel=0.15)


@pytest.mark.parametrize("method", [quantize_static, quantize_dynamic])
def test_a_model_that_refuses_the_usual_sizes_runs_on_others(method: Any) -> None:
    """An open axis gets 64 elements at first; this model takes 16."""
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[b, n] x) => (float[b, 32] y)
        { t = MatMul(x, w) y = Relu(t) }"""
    weight = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    model = ir.from_onnx_text(text, initializers=[ir.tensor(weight, name="w")])
    with pytest.warns(GeneratedSamplesWarning):
        quantized, report = method(model, None, IntegerOptions(skip_slow=False))
    assert "random samples" in report.samples
    assert any("without VNNI" in note for note in report.notes) == saturates()
    feed = {"x": np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)}
    exact = np.maximum(feed["x"] @ weight, 0)
    assert snr(exact, run(quantized, feed)[0]) > 25


def test_a_model_that_runs_with_no_generated_sample_says_what_to_do() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[b, 3] x) => (float[b, 5] y)
        <int64[2] s = {7, 5}> { t = MatMul(x, w) y = Reshape(t, s) }"""
    model = ir.from_onnx_text(text, initializers=[ir.tensor(np.eye(3, dtype=np.float32), name="w")])
    with pytest.warns(GeneratedSamplesWarning), pytest.raises(UsageError, match="give samples of your own"):
        quantize_dynamic(model, None, IntegerOptions(skip_slow=False))
