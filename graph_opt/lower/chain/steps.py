"""The steps of a chain for each kind of node, by operator.

A step reads and writes rows: [..., width], with leading axes that all rows of a chain share.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ...graph.edit import (
    MICROSOFT,
    constant,
    float_attribute,
    int_attribute,
    static_size,
    text_attribute,
    weight,
)
from .program import (
    ABSENT,
    ACTIVATE,
    ADD,
    ATTENTION,
    CENTER,
    GATE,
    JOIN,
    LINEAR,
    MULTIPLY,
    NEAR_ATTENTION,
    NORM,
    PART,
    SUM,
    ChainProgram,
    float_bits,
)

_OWN = "carryall"
_WEIGHTS = ("inputs", "outputs", "bits", "block_size", "group_size", "offsets")
ATTENTION_SIZES = (
    "num_heads",
    "kv_num_heads",
    "head_size",
    "block_size",
    "window",
    "rotary_dim",
    "interleaved",
    "cache_type",
)
_ATTENTION_INPUTS, _NEAR_INPUTS = 14, 17  # of the steps ATTENTION and NEAR_ATTENTION
_KEY, _VALUE = 1, 2  # inputs of attention that are rows
# Functions of the step ACTIVATE; in QuickGelu the factor is 1 (SiLU) or 1.702.
_GELU, _GELU_TANH, _SILU, _RELU, _QUICK_GELU = range(5)
_FACTORS = {1.0: _SILU, 1.702: _QUICK_GELU}
WORK = frozenset({(_OWN, "QuantizedLinear"), (_OWN, "PagedAttention")})
_SIZED = WORK | {(_OWN, "AllGather")}  # their attributes tell the widths of their results


def row_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a supported node that are rows."""
    count = {"PagedAttention": 3, "Add": 2, "Mul": 2, "SkipSimplifiedLayerNormalization": 2}.get(
        node.op_type, 1
    )
    return [value for value in node.inputs[:count] if value is not None]


def is_part(node: ir.Node) -> bool:
    """Return whether a supported node's results are parts of its input, in the same memory."""
    return node.op_type == "Split"


def is_supported(node: ir.Node, *, approximate: bool = False) -> bool:
    """Return whether a node can be a step.

    Args:
        node: the node.
        approximate: steps whose results differ from onnxruntime's in the last bits may be used too.
    """
    kind = node.domain, node.op_type
    test = _TESTS.get(kind) or (_APPROXIMATE.get(kind) if approximate else None)
    return test is not None and test(node)


def widths(node: ir.Node) -> list[int]:
    """Return the floats of a row of each result of a supported node."""
    match node.op_type:
        case "QuantizedLinear":
            return [int_attribute(node, "outputs", 0)]
        case "PagedAttention":
            return [int_attribute(node, "num_heads", 0) * int_attribute(node, "head_size", 0)]
        case "Split":
            return [int(size) for size in _sizes(node)]
        case "SiluAndMul":
            return [_width(node.inputs[0]) // 2]
        case "AllGather":
            return [int_attribute(node, "whole", 0)]
        case _:
            return [_width(node.inputs[0])] * len(node.outputs)


def write(node: ir.Node, program: ChainProgram) -> None:
    """Add the steps of a supported node to a program."""
    _WRITERS[node.op_type](node, program)


def _width(value: ir.Value | None) -> int:
    """Return the floats of a row; 0 if they are not known."""
    node = None if value is None else value.producer()
    if node is not None and (node.domain, node.op_type) in _SIZED:
        return widths(node)[0]
    return static_size(value, -1) or 0


def _sizes(split: ir.Node) -> list[int]:
    found = constant(split.inputs[1]) if len(split.inputs) > 1 else None
    return [] if found is None else [int(size) for size in found]


def _is_rows(value: ir.Value | None) -> bool:
    typed = value is not None and value.dtype in (ir.DataType.FLOAT, None)
    return typed and weight(value) is None and _width(value) > 0


def _is_split(node: ir.Node) -> bool:
    rank = None if node.inputs[0] is None or node.inputs[0].shape is None else len(node.inputs[0].shape)
    last = int_attribute(node, "axis", 0) in (-1, *([rank - 1] if rank else []))
    return last and _is_rows(node.inputs[0]) and sum(_sizes(node)) == _width(node.inputs[0])


def _is_norm(node: ir.Node) -> bool:
    scale = weight(node.inputs[1])
    rank = None if node.inputs[0] is None or node.inputs[0].shape is None else len(node.inputs[0].shape)
    last = int_attribute(node, "axis", -1) in (-1, *([rank - 1] if rank else []))
    plain = scale is not None and len(scale.shape) == 1 and scale.dtype == ir.DataType.FLOAT
    alone = all(not output.name or not output.uses() for output in node.outputs[1:])
    return plain and last and alone and _is_rows(node.inputs[0])


def _is_skip_norm(node: ir.Node) -> bool:
    scale, width = weight(node.inputs[2]), _width(node.inputs[0])
    bias = weight(node.inputs[3]) if len(node.inputs) > 3 else None
    with_bias = len(node.inputs) > 3 and node.inputs[3] is not None
    unused = all(not output.uses() and not output.is_graph_output() for output in node.outputs[1:3])
    sized = scale is not None and tuple(scale.shape.numpy()) == (width,)
    return (
        sized
        and unused
        and (not with_bias or (bias is not None and tuple(bias.shape.numpy()) == (width,)))
        and all(_is_rows(value) and _width(value) == width for value in node.inputs[:2])
    )


def _is_sum(node: ir.Node) -> bool:
    left, right = node.inputs
    if (
        left is None
        or right is None
        or left.shape is None
        or left.shape != right.shape
        or len(left.shape) < 2
    ):
        return False
    return _is_rows(left) and _is_rows(right)


def _is_centered(node: ir.Node) -> bool:
    width = _width(node.inputs[0])
    vectors = [value for value in node.inputs[1:] if value is not None]
    tensors = [tensor for value in vectors if (tensor := weight(value)) is not None]
    plain = len(tensors) == len(vectors) > 0
    sized = all(
        tuple(tensor.shape.numpy()) == (width,) and tensor.dtype == ir.DataType.FLOAT for tensor in tensors
    )
    alone = all(not output.name or not output.uses() for output in node.outputs[1:])
    return plain and sized and alone and int_attribute(node, "axis", -1) == -1 and _is_rows(node.inputs[0])


def _norm(node: ir.Node, program: ChainProgram) -> None:
    x, scale = program.rows(node.inputs[0]), program.input(node.inputs[1])
    out = program.out(node.outputs[0], widths(node)[0], (x,))
    program.step(NORM, out, x, scale, float_bits(float_attribute(node, "epsilon", 1e-5)))


def _skip_norm(node: ir.Node, program: ChainProgram) -> None:
    x, other = (program.rows(value) for value in node.inputs[:2])
    scale, bias = program.input(node.inputs[2]), program.input((*node.inputs, None)[3])
    width = widths(node)[0]
    total = node.outputs[3] if len(node.outputs) > 3 else None
    if total is not None and (total.uses() or total.is_graph_output()):
        summed = program.out(total, width, (x, other))
    else:
        summed = program.scratch(width, (x, other))
    program.step(ADD, summed, x, other, bias)
    out = program.out(node.outputs[0], width, (summed,))
    program.step(NORM, out, summed, scale, float_bits(float_attribute(node, "epsilon", 1e-5)))


def _add(node: ir.Node, program: ChainProgram) -> None:
    x, other = (program.rows(value) for value in node.inputs)
    program.step(ADD, program.out(node.outputs[0], widths(node)[0], (x, other)), x, other, ABSENT)


def _multiply(node: ir.Node, program: ChainProgram) -> None:
    x, other = (program.rows(value) for value in node.inputs)
    program.step(MULTIPLY, program.out(node.outputs[0], widths(node)[0], (x, other)), x, other)


def _centered(node: ir.Node, program: ChainProgram) -> None:
    x, scale = program.rows(node.inputs[0]), program.input(node.inputs[1])
    bias = program.input((*node.inputs, None)[2])
    out = program.out(node.outputs[0], widths(node)[0], (x,))
    program.step(CENTER, out, x, scale, bias, float_bits(float_attribute(node, "epsilon", 1e-5)))


def _activate(node: ir.Node, program: ChainProgram) -> None:
    function = _RELU
    if node.op_type == "Gelu":
        function = _GELU_TANH if text_attribute(node, "approximate", "none") == "tanh" else _GELU
    elif node.op_type == "QuickGelu":
        function = _FACTORS[_factor(node)]
    x = program.rows(node.inputs[0])
    program.step(ACTIVATE, program.out(node.outputs[0], widths(node)[0], (x,)), x, function)


def _factor(node: ir.Node) -> float:
    return round(float_attribute(node, "alpha", 1.702), 6)


def _gate(node: ir.Node, program: ChainProgram) -> None:
    x = program.rows(node.inputs[0])
    program.step(GATE, program.out(node.outputs[0], widths(node)[0]), x)


def _split(node: ir.Node, program: ChainProgram) -> None:
    x, first = program.rows(node.inputs[0]), 0
    for output, size in zip(node.outputs, widths(node), strict=True):
        program.step(PART, program.view(output, size), x, first)
        first += size


def _linear(node: ir.Node, program: ChainProgram) -> None:
    x, tiles = program.rows(node.inputs[0]), program.input(node.inputs[1])
    bias = program.input((*node.inputs, None)[2])
    out = program.out(node.outputs[0], widths(node)[0])
    program.step(LINEAR, out, x, tiles, bias, *(int_attribute(node, name, 0) for name in _WEIGHTS))


def _meeting(node: ir.Node, program: ChainProgram) -> None:
    x, out = program.rows(node.inputs[0]), program.out(node.outputs[0], widths(node)[0])
    program.step(SUM if node.op_type == "AllReduce" else JOIN, out, x, int_attribute(node, "number", 0))


def _attention(node: ir.Node, program: ChainProgram) -> None:
    near = len(node.inputs) > _ATTENTION_INPUTS
    count = _NEAR_INPUTS if near else _ATTENTION_INPUTS
    operands = [*node.inputs, *[None] * (count - len(node.inputs))]
    places = [
        program.rows(value) if value is not None and index <= _VALUE else program.input(value)
        for index, value in enumerate(operands)
    ]
    out = program.out(node.outputs[0], widths(node)[0])
    sizes = [int_attribute(node, name, 0) for name in ATTENTION_SIZES]
    floats = [float_bits(float_attribute(node, name, 0.0)) for name in ("scale", "softcap")]
    program.step(
        NEAR_ATTENTION if near else ATTENTION,
        out,
        *places,
        *sizes,
        *floats,
        int_attribute(node, "reads_only", 0),
    )


_TESTS: dict[tuple[str, str], Callable[[ir.Node], bool]] = {
    (_OWN, "QuantizedLinear"): lambda node: True,
    (_OWN, "PagedAttention"): lambda node: True,
    (_OWN, "SiluAndMul"): lambda node: _is_rows(node.inputs[0]),
    (_OWN, "AllReduce"): lambda node: _is_rows(node.inputs[0]),
    (_OWN, "AllGather"): lambda node: _is_rows(node.inputs[0]),
    ("", "RMSNormalization"): _is_norm,
    ("", "SimplifiedLayerNormalization"): _is_norm,
    (MICROSOFT, "BranchwiseRMSNorm"): _is_norm,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _is_skip_norm,
    ("", "Add"): _is_sum,
    ("", "Split"): _is_split,
}
_APPROXIMATE: dict[tuple[str, str], Callable[[ir.Node], bool]] = {
    ("", "Mul"): _is_sum,
    ("", "LayerNormalization"): _is_centered,
    ("", "Gelu"): lambda node: _is_rows(node.inputs[0]),
    ("", "Relu"): lambda node: _is_rows(node.inputs[0]),
    (MICROSOFT, "QuickGelu"): lambda node: _is_rows(node.inputs[0]) and _factor(node) in _FACTORS,
}
_WRITERS: dict[str, Callable[[ir.Node, ChainProgram], None]] = {
    "QuantizedLinear": _linear,
    "PagedAttention": _attention,
    "SiluAndMul": _gate,
    "AllReduce": _meeting,
    "AllGather": _meeting,
    "RMSNormalization": _norm,
    "SimplifiedLayerNormalization": _norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
    "Add": _add,
    "Mul": _multiply,
    "LayerNormalization": _centered,
    "Gelu": _activate,
    "Relu": _activate,
    "QuickGelu": _activate,
    "Split": _split,
    "BranchwiseRMSNorm": _norm,
}
