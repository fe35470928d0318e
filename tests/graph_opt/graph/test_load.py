"""Invalid model files raise a GraphError with the reason; valid files load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carryall.errors import GraphError
from carryall.graph_opt.graph.load import check_model, load_model

NEWEST = onnx.defs.onnx_opset_version()


def write(path: Path, body: str, opsets: str = '"" : 20') -> Path:
    """Write a model without checks; onnx_ir would refuse some of these models."""
    text = f"<ir_version: 10, opset_import: [{opsets}]> net (float[3] x) => (float[3] y) {body}"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return path


LOOP = """{ n = Constant <value_int = 3>() t = Constant <value = bool {1}>()
    y = Loop(n, t, x) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w)
        { d = Identity(c) w = Add(v, READ) }> late = Abs(x) }"""
INVALID = {
    "cycle": ("{ a = Add(x, b) b = Neg(a) y = Abs(b) }", "has a cycle"),
    "an undefined value": ("{ y = Add(x, nope) }", "Add reads nope, which no node"),
    "the same in a subgraph": (LOOP.replace("READ", "nope"), "Add reads nope, which no node"),
    "a value of a subgraph, read outside": (
        LOOP.replace("READ", "x").replace("Abs(x)", "Abs(w)"),
        "Abs reads w, which no node",
    ),
    "an undefined output": ("{ z = Neg(x) }", "no node of the graph computes the output y"),
    "a value made twice": ("{ y = Neg(x) y = Abs(x) }", "'y' is redeclared"),
    "an unknown attribute": ("{ y = Abs<axis = 1>(x) }", "Abs is not valid: it has no attribute axis"),
    "an attribute of another type": (
        "{ y = LeakyRelu<alpha = 1>(x) }",
        "LeakyRelu is not valid: its attribute alpha has type INT instead of FLOAT",
    ),
    "a missing attribute": ("{ y = Cast(x) }", "Cast is not valid: its required attribute to is missing"),
    "too few inputs": ("{ y = Add(x) }", "it has 1 inputs instead of 2 to 2"),
    "too many outputs": ("{ y, z = Abs(x) }", "it has 2 outputs instead of 1 to 1"),
    "a removed operator": ("{ y = Upsample(x, x) }", "Upsample is not valid: opset 20 no longer has it"),
    "the same in a body": (
        LOOP.replace("READ", "v").replace("Add(v", "Add<k = 1>(v"),
        "Add is not valid: it has no attribute k",
    ),
    "an undeclared domain": ("{ y = their.own.Op(x) }", "imports no opset of that domain"),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_graph_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    body, reason = INVALID[case]
    with pytest.raises(GraphError, match=reason) as error:
        load_model(write(tmp_path / "net.onnx", body))
    assert "net.onnx" in str(error.value)


@pytest.mark.parametrize("body", [LOOP.replace("READ", name) for name in ("v", "x", "late")])
def test_subgraphs_read_outer_values(body: str, tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "net.onnx", body))
    onnx.checker.check_model(ir.to_proto(model))  # which requires topological order


def test_nodes_are_sorted_topologically(tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "net.onnx", "{ y = Abs(b) b = Neg(x) }"))
    assert [node.op_type for node in model.graph] == ["Neg", "Abs"]


def test_unknown_opsets_are_named_and_other_domains_are_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(GraphError, match=f"has opset 99; .* supports opsets up to {NEWEST}"):
        load_model(write(path, "{ y = Abs(x) }", '"" : 99'))
    load_model(write(path, "{ a = their.own.Op <k = 3> (x) y = Abs(a) }", '"" : 20, "their.own" : 99'))
    load_model(write(path, "{ y = Abs(x) }", f'"ai.onnx" : {NEWEST}'))


def test_operators_without_a_schema_are_not_checked(tmp_path: Path) -> None:
    """onnxruntime adds operators to the standard domain, which ONNX's checker refuses."""
    body = "{ y = SimplifiedLayerNormalization<axis = -1, stash_type = 1>(x, x) }"
    assert len(load_model(write(tmp_path / "net.onnx", body)).graph) == 1


def test_files_that_are_not_onnx(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.touch()
    with pytest.raises(GraphError, match="is an empty file"):
        load_model(path)
    path.write_text("this is no model")
    with pytest.raises(GraphError, match="cannot be read as ONNX"):
        load_model(path)
    path.write_bytes(onnx.ModelProto(ir_version=10).SerializeToString())
    with pytest.raises(GraphError, match="has no graph"):
        load_model(path)


def test_missing_and_truncated_weights_are_found_before_any_work(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> net (float[4] x) => (float[4] y) { y = Add(x, w) }'
    model = ir.from_onnx_text(text, initializers=[ir.tensor(np.ones(4, np.float32), name="w")])
    ir.save(model, tmp_path / "net.onnx", external_data="net.data", size_threshold_bytes=0)
    check_model(load_model(tmp_path / "net.onnx"), "net")
    data = tmp_path / "net.data"
    data.write_bytes(data.read_bytes()[:15])
    with pytest.raises(
        GraphError, match=r"net.data is truncated: it has 15 bytes, .* stores w up to byte 16"
    ):
        load_model(tmp_path / "net.onnx")
    data.unlink()
    with pytest.raises(GraphError, match=r"stores weight w in .*net.data, which does not exist"):
        load_model(tmp_path / "net.onnx")


SOUND = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["" : 20]> net (float[3] x) => (float[3] y) <float[3] w = {1, 2, 3}> '
    + LOOP.replace("READ", "w").replace("late = Abs(x)", "")
).SerializeToString()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    cut=st.integers(0, len(SOUND)),
    flips=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(1, 255)), max_size=4),
)
def test_damaged_files_load_or_are_refused(cut: int, flips: list[tuple[int, int]], tmp_path: Path) -> None:
    content = bytearray(SOUND)
    for place, mask in flips:
        content[place] ^= mask
    path = tmp_path / "net.onnx"
    path.write_bytes(content[:cut] if not flips else content)
    try:
        load_model(path)
    except GraphError as error:
        assert "net.onnx" in str(error)  # noqa: PT017 -- both outcomes are right
