"""Low-rank branches of linear layers."""

from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.errors import UsageError
from carryall.graph_opt.lower.pipelines.lora import LoraPass, linears

X, LOGITS = "float[batch, sequence, 4] x", "float[batch, sequence, 3] logits"
HEAD = "n = RMSNormalization({}, scale) logits = MatMul(n, head)"
MASK = "bool[batch, 1, lora_columns] lora_mask"
CONSTANTS = {
    "a.q_proj.weight": np.ones((4, 2), np.float32),
    "a.up.weight": np.ones((2, 2), np.float32),
    "bias": np.ones(2, np.float32),
    "scale": np.ones(2, np.float32),
    "head": np.ones((2, 3), np.float32),
}
ZERO = {"zero": np.array(0, np.float32)}


def branch(module: str, x: str, inputs: int, outputs: int) -> tuple[str, str]:
    """Return the inputs and the nodes of a branch, whose result is ``delta``."""
    down, up = f'"lora.{module}.down"', f'"lora.{module}.up"'
    names = f"float[lora_columns, {inputs}] {down}, float[lora_columns, {outputs}] {up}"
    return names, (
        f"t = Transpose <perm = [1, 0]> ({down}) low = MatMul({x}, t) kept = Where(lora_mask, low, zero) "
        f"delta = MatMul(kept, {up})"
    )


@pytest.mark.parametrize("bias", [False, True])
def test_a_branch_is_added_behind_the_bias(bias: bool) -> None:
    product = (
        'm = MatMul(x, "a.q_proj.weight") y = Add(m, bias)' if bias else 'y = MatMul(x, "a.q_proj.weight")'
    )
    model = graph(f"g ({X}) => ({LOGITS}) {{ {product} {HEAD.format('y')} }}", **CONSTANTS)
    assert apply(LoraPass(), model) == []
    inputs, nodes = branch("a.q_proj", "x", 4, 2)
    after = f"{product} {nodes} z = Add(y, delta) {HEAD.format('z')}"
    assert_same(model, graph(f"g ({X}, {MASK}, {inputs}) => ({LOGITS}) {{ {after} }}", **CONSTANTS, **ZERO))


def test_the_branch_of_a_half_precision_layer_is_float() -> None:
    half = {name: array.astype(np.float16) for name, array in CONSTANTS.items()}
    x, logits = X.replace("float", "float16"), LOGITS.replace("float", "float16")
    product = 'y = MatMul(x, "a.q_proj.weight")'
    model = graph(f"g ({x}) => ({logits}) {{ {product} {HEAD.format('y')} }}", **half)
    apply(LoraPass(), model)
    inputs, nodes = branch("a.q_proj", "wide", 4, 2)
    after = (
        f"{product} wide = Cast <to = 1> (x) {nodes} c = Cast <to = 10> (delta) z = Add(y, c) "
        f"{HEAD.format('z')}"
    )
    assert_same(model, graph(f"g ({x}, {MASK}, {inputs}) => ({logits}) {{ {after} }}", **half, **ZERO))


def test_only_named_modules_have_branches() -> None:
    body = 'y = MatMul(x, "a.q_proj.weight") u = MatMul(y, "a.up.weight")'
    model = graph(f"g ({X}) => ({LOGITS}) {{ {body} {HEAD.format('u')} }}", **CONSTANTS)
    apply(LoraPass(["up"]), model)
    inputs, nodes = branch("a.up", "y", 2, 2)
    after = f"{body} {nodes} z = Add(u, delta) {HEAD.format('z')}"
    assert_same(model, graph(f"g ({X}, {MASK}, {inputs}) => ({LOGITS}) {{ {after} }}", **CONSTANTS, **ZERO))
    with pytest.raises(UsageError, match=r"no linear layer v_proj .*; it has: q_proj, up"):
        LoraPass(["v_proj"])(graph(f"g ({X}) => ({LOGITS}) {{ {body} {HEAD.format('u')} }}", **CONSTANTS))


QUANTIZED = {
    "weight-only": 'w = DequantizeLinear <axis = 0, block_size = 2> ("a.q_proj.weight.values", s) '
    "y = MatMul(x, w)",
    "minima": """d = DequantizeLinear <axis = 0, block_size = 2> ("a.q_proj.weight.values", s)
        e = Reshape(d, shape) f = Add(e, minima) w = Reshape(f, whole) y = MatMul(x, w)""",
    "static": """q = QuantizeLinear(x, step, zero8) d = DequantizeLinear(q, step, zero8)
        w = DequantizeLinear <axis = 1> ("a.q_proj.weight.values", c) y = MatMul(d, w)""",
    "dynamic": """q, u, p = DynamicQuantizeLinear(x) i = MatMulInteger(q, "a.q_proj.weight.values", p)
        f = Cast <to = 1> (i) v = Mul(u, c) y = Mul(f, v)""",
    "ordered": 'o = Gather <axis = -1> (x, order) y = MatMul(o, "a.q_proj.weight")',
}


@pytest.mark.parametrize("form", QUANTIZED)
def test_the_branch_of_a_quantized_layer_reads_its_float_input(form: str) -> None:
    constants = {
        **CONSTANTS,
        "a.q_proj.weight.values": np.ones((4, 2), np.int8),
        "s": np.ones((2, 2), np.float32),
        "c": np.ones(2, np.float32),
        "step": np.float32(0.1),
        "zero8": np.array(0, np.int8),
        "shape": np.array([2, 2, 2]),
        "whole": np.array([4, 2]),
        "minima": np.ones((2, 1, 2), np.float32),
        "order": np.array([3, 1, 2, 0]),
    }
    model = graph(f"g ({X}) => ({LOGITS}) {{ {QUANTIZED[form]} {HEAD.format('y')} }}", **constants)
    apply(LoraPass(), model)
    inputs, nodes = branch("a.q_proj", "x", 4, 2)
    after = f"{QUANTIZED[form]} {nodes} z = Add(y, delta) {HEAD.format('z')}"
    assert_same(model, graph(f"g ({X}, {MASK}, {inputs}) => ({LOGITS}) {{ {after} }}", **constants, **ZERO))


def test_products_of_other_rows_and_unnamed_weights_are_no_linear_layers() -> None:
    """Rows of an expert belong to any sequence; the weights of foreign exports have no module's name."""
    experts = 'r = Reshape(x, rows) e = MatMul(r, "a.q_proj.weight") y = Reshape(e, back)'
    constants = {
        **CONSTANTS,
        "rows": np.array([-1, 4]),
        "back": np.array([1, -1, 2]),
        "onnx_1": np.ones((2, 2), np.float32),
    }
    body = f"{experts} u = MatMul(y, onnx_1) {HEAD.format('u')}"
    model = graph(f"g ({X}) => ({LOGITS}) {{ {body} }}", **constants)
    with pytest.raises(UsageError, match="it has: none with the name of a module"):
        LoraPass()(model)
    assert list(linears(model.graph)) == []
