"""The standard's operators with recurrent states in OpenVINO equal ONNX's reference evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from carryall.errors import GraphError
from carryall.providers.openvino.model import OpenVinoSession, compile_model, open_core, read

HEADS, KEY, VALUE, TOKENS, CHANNELS = 4, 8, 16, 7, 6
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
Feeds = dict[str, np.ndarray[Any, Any]]


def attention(
    rule: str, decay: int, beta: int, scale: float, state: bool = True, queries: int = HEADS
) -> str:
    past = f"float[b, {HEADS}, {KEY}, {VALUE}] past, " if state else ""
    optional = [
        ", past" if state else ", ",
        ", decay" if decay else ", ",
        ", beta" if beta else ", ",
    ]
    return f"""<ir_version: 12, opset_import: ["" : 27]>
    g (float[b, t, {queries * KEY}] q, float[b, t, {HEADS * KEY}] k, float[b, t, {HEADS * VALUE}] v, {past}
       float[b, t, {decay or 1}] decay, float[b, t, {beta or 1}] beta) => (y, present) {{
        y, present = LinearAttention <update_rule = "{rule}", q_num_heads = {queries}, kv_num_heads = {HEADS},
            scale = {scale}> (q, k, v{"".join(optional)})
    }}"""


def convolution(inputs: str, attributes: str = "", taps: int = 4) -> str:
    return f"""<ir_version: 12, opset_import: ["" : 27]>
    g (float[b, {CHANNELS}, t] x, float[b, {CHANNELS}, {taps - 1}] past, float[{CHANNELS}] bias,
       float[{CHANNELS}, 1, {taps}] w) => (y, present) {{
        y, present = CausalConvWithState {attributes} (x, w{inputs})
    }}"""


def random_feeds(model: onnx.ModelProto, tokens: int = TOKENS) -> Feeds:
    rng, feeds = np.random.default_rng(3), Feeds()
    for value in model.graph.input:
        shape = [d.dim_value or {"b": 2, "t": tokens}[d.dim_param] for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.uniform(-1, 1, shape).astype(np.float32)
    if "decay" in feeds:
        feeds["decay"] = -np.abs(feeds["decay"])
    return feeds


def opened(model: onnx.ModelProto, folder: Path) -> OpenVinoSession:
    onnx.save(model, folder / "model.onnx")
    core = open_core("CPU")
    return OpenVinoSession(compile_model(core, read(core, folder / "model.onnx"), "CPU", F32))


def run(session: OpenVinoSession, feeds: Feeds) -> list[np.ndarray[Any, Any]]:
    """Run with those feeds that the compiled model has kept."""
    names = {value.name for value in session.get_inputs()}
    return session.run(None, {name: array for name, array in feeds.items() if name in names})


def check(text: str, folder: Path) -> OpenVinoSession:
    model = ir.to_proto(ir.from_onnx_text(text))
    session, evaluator = opened(model, folder), ReferenceEvaluator(model)
    for tokens in (TOKENS, 1):
        feeds = random_feeds(model, tokens)
        for result, expected in zip(run(session, feeds), evaluator.run(None, feeds), strict=True):
            assert result.shape == expected.shape
            np.testing.assert_allclose(result, expected, rtol=0, atol=3e-6)
    return session


def layers(session: OpenVinoSession) -> set[str]:
    model = session.compiled.get_runtime_model()
    return {str(node.get_rt_info()["layerType"].astype(str)) for node in model.get_ops()}


@pytest.mark.parametrize(
    ("rule", "decay", "beta"),
    [
        ("linear", 0, 0),
        ("gated", HEADS, 0),
        ("gated", HEADS * KEY, 0),
        ("delta", 0, HEADS),
        ("delta", 0, 1),
        ("gated_delta", HEADS, HEADS),
        ("gated_delta", HEADS, 1),
        ("gated_delta", HEADS * KEY, HEADS),
    ],
)
def test_each_rule_equals_the_reference(rule: str, decay: int, beta: int, tmp_path: Path) -> None:
    check(attention(rule, decay, beta, 0.0), tmp_path)


@pytest.mark.parametrize("scale", [0.0, 0.25, 1.0])
def test_the_gated_delta_rule_is_openvinos_own_kernel(scale: float, tmp_path: Path) -> None:
    """A scale that is not the root of the width is part of the queries."""
    session = check(attention("gated_delta", HEADS, HEADS, scale), tmp_path)
    assert "GatedDeltaNet" in layers(session)


def test_attributes_have_the_defaults_of_the_standard(tmp_path: Path) -> None:
    text = attention("gated_delta", HEADS, HEADS, 0.0)
    shorter = text.replace('update_rule = "gated_delta", ', "").replace(
        """,
            scale = 0.0>""",
        ">",
    )
    assert "scale" not in shorter
    assert "update_rule" not in shorter
    check(shorter, tmp_path)


def test_a_state_that_is_absent_is_zero(tmp_path: Path) -> None:
    check(attention("gated_delta", HEADS, HEADS, 0.0, state=False), tmp_path)


def test_other_heads_of_queries_are_refused(tmp_path: Path) -> None:
    model = ir.to_proto(ir.from_onnx_text(attention("gated", HEADS, 0, 0.0, queries=2 * HEADS)))
    with pytest.raises(GraphError, match="8 heads of queries and 4 of states"):
        opened(model, tmp_path)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("inputs", [", bias, past", ", , past", ", bias", ""])
@pytest.mark.parametrize("attributes", ["", '<activation = "silu">'])
def test_convolutions_equal_the_reference(inputs: str, attributes: str, taps: int, tmp_path: Path) -> None:
    check(convolution(inputs, attributes, taps), tmp_path)
