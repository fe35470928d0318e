"""Rewrite operators whose form or meaning changed between opsets 7 and 23 into the newer form.

Source: ONNX's changelog of operators. Attributes became inputs, defaults changed, operators were replaced.
All other operators have the same meaning in both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ...graph.edit import constant, insert, int_attribute, replace, shared_constant, text_attribute
from ...graph.lazy import Array

RANK_DEPENDENT_BELOW = (
    13  # Softmax flattened axes then; if the rank is unknown, its new form needs more nodes
)
_OLD_DEFAULT_AXIS = 1
_MODE = "coordinate_transformation_mode"


def unsupported_form(node: ir.Node, version: int) -> str | None:
    """Return why a node of opset ``version`` has no equivalent in opset 23, None if it has one."""
    match node.op_type:
        case "Scan" if version < 9:
            return "opset 9 removed its input sequence_lens"
        case "BatchNormalization" if version < 9 and not int_attribute(node, "spatial", 1):
            return "opset 9 removed spatial = 0"
        case "BatchNormalization" if version < 14 and any(x.uses() for x in node.outputs[1:]):
            return "opset 14 changed the outputs of training"
        case "Dropout" if version < 10 and any(x.uses() for x in node.outputs[1:]):
            return "its mask had another type before opset 10"
        case "Resize" if version < 11 and _shrinks_and_grows(node):
            return "opset 10 rounds coordinates up on axes that shrink, and down on others"
        case "Resize" if text_attribute(node, _MODE, "") == "tf_half_pixel_for_nn":
            return "opset 13 removed the coordinates tf_half_pixel_for_nn"
        case _:
            return None


def raise_form(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    """Rewrite a node of opset ``version`` in the form of opset 23; return whether it was changed.

    Args:
        graph: the main graph, which holds new constants.
        node: a node of the main graph or a subgraph for which ``unsupported_form`` is None.
        version: the node's opset.
    """
    until, change = _FORMS.get(node.op_type, (0, _nothing))
    return version < until and change(graph, node, version)


def _nothing(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    return False


def _operand(graph: ir.Graph, node: ir.Node, index: int, name: str, array: Array) -> None:
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, shared_constant(graph, f"opset.{node.op_type}.{name}", array))


def _numbers(node: ir.Node, name: str) -> list[int] | None:
    attribute = node.attributes.pop(name, None)
    return None if attribute is None else list(attribute.as_ints())


def _text(numbers: list[int]) -> str:
    return "_".join(map(str, numbers)).replace("-", "m")


def _axes_operand(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    return _ints_operand(graph, node, "axes", 1)


def _ints_operand(graph: ir.Graph, node: ir.Node, name: str, index: int) -> bool:
    numbers = _numbers(node, name)
    if numbers is None:
        return False
    _operand(graph, node, index, f"{name}.{_text(numbers)}", np.array(numbers, np.int64))
    return True


def _split(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    _ints_operand(graph, node, "split", 1)
    if len(node.inputs) < 2 or node.inputs[1] is None:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    return True


def _slice(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    if "starts" not in node.attributes:
        return False
    count = len(node.attributes["starts"].as_ints())
    for index, name in enumerate(("starts", "ends", "axes"), start=1):
        if not _ints_operand(graph, node, name, index):
            axes = list(range(count))
            _operand(graph, node, index, f"axes.{_text(axes)}", np.array(axes, np.int64))
    return True


def _top_k(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    count = node.attributes.pop("k", None)
    if count is not None:
        _operand(graph, node, 1, f"k.{count.as_int()}", np.array([count.as_int()], np.int64))
    return count is not None


def _clip(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    """Turn the bounds into scalar inputs of the operand's type, a float type in opset 6."""
    changed = False
    for index, name in enumerate(("min", "max"), start=1):
        bound = node.attributes.pop(name, None)
        if bound is not None:
            number = bound.as_float()
            _operand(graph, node, index, f"{number:g}", _like(node, number))
            changed = True
    return changed


def _pad(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    fill = node.attributes.pop("value", None)
    if fill is not None and fill.as_float():
        _operand(graph, node, 2, f"value.{fill.as_float():g}", _like(node, fill.as_float()))
    return _ints_operand(graph, node, "pads", 1)


def _like(node: ir.Node, number: float) -> Array:
    kind = node.inputs[0].dtype if node.inputs[0] is not None else None
    return np.array(number, (kind or ir.DataType.FLOAT).numpy())


def _dropout(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    """Remove the ratio: before opset 12 Dropout had no training mode."""
    return node.attributes.pop("ratio", None) is not None


def _batch_norm(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    node.attributes.pop("spatial", None)
    if len(node.outputs) > 1:
        node.resize_outputs(1)
    return True


def _softmax(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    """Before opset 13 all axes from ``axis`` on were flattened into one."""
    x, axis = node.inputs[0], int_attribute(node, "axis", _OLD_DEFAULT_AXIS)
    rank = None if x is None or x.shape is None else len(x.shape)
    if rank is not None and axis % rank == rank - 1:
        node.attributes["axis"] = ir.AttrInt64("axis", -1)
        return True
    shape = insert(node, "Shape", [x]).outputs[0]
    rows = insert(node, "Flatten", [x], {"axis": axis}).outputs[0]
    found = insert(node, node.op_type, [rows], {"axis": -1}).outputs[0]
    _replace_node(node, insert(node, "Reshape", [found, shape]).outputs[0])
    return True


def _upsample(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    scales = node.attributes.get("scales")
    factors: ir.Value | None
    if scales is not None:
        numbers = np.array(scales.as_floats(), np.float32)
        factors = shared_constant(graph, "opset.scales." + "_".join(f"{x:g}" for x in numbers), numbers)
    else:
        factors = node.inputs[1]
    return _resize_from(node, factors)


def _resize(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    """Opset 10 did not say which pixel is the nearest: onnxruntime takes the next one on axes that shrink."""
    if version >= 11:
        return False
    scales = constant(node.inputs[1])
    if not _is_nearest(node):
        return _resize_from(node, node.inputs[1])
    if scales is not None:
        return _resize_from(node, node.inputs[1], "ceil" if (scales < 1).any() else "floor")
    one = shared_constant(graph, "opset.Resize.one", np.ones(1, np.float32))
    shrinking = insert(node, "Min", [node.inputs[1], one]).outputs[0]
    node.replace_input_with(0, _resized(node, shrinking, "ceil"))
    return _resize_from(node, insert(node, "Max", [node.inputs[1], one]).outputs[0])


def _shrinks_and_grows(node: ir.Node) -> bool:
    """Return whether a nearest Resize shrinks one axis and enlarges another, by constants.

    Two nodes would be needed, and onnxruntime copies what keeps its size whatever the scale.
    """
    scales = constant(node.inputs[1])
    return _is_nearest(node) and scales is not None and bool((scales < 1).any() and (scales > 1).any())


def _is_nearest(node: ir.Node) -> bool:
    return text_attribute(node, "mode", "nearest") == "nearest"


def _resize_from(node: ir.Node, scales: ir.Value | None, nearest: str = "floor") -> bool:
    """Write a Resize at coordinate / scale, rounded down as by Upsample, or up."""
    _replace_node(node, _resized(node, scales, nearest))
    return True


def _resized(node: ir.Node, scales: ir.Value | None, nearest: str) -> ir.Value:
    mode = text_attribute(node, "mode", "nearest")
    attributes = {"mode": mode, _MODE: "asymmetric", "nearest_mode": nearest}
    return insert(node, "Resize", [node.inputs[0], None, scales], attributes).outputs[0]


def _scatter(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    _replace_node(node, insert(node, "ScatterElements", node.inputs, node.attributes).outputs[0])
    return True


def _roi_align(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    node.attributes[_MODE] = ir.AttrString(_MODE, "output_half_pixel")
    return True


def _dft(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    axis = int_attribute(node, "axis", 1)
    node.attributes.pop("axis", None)
    _operand(graph, node, 2, f"axis.{axis}", np.array(axis, np.int64))
    return True


def _grid_sample(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    newer = {"bilinear": "linear", "bicubic": "cubic"}
    mode = text_attribute(node, "mode", "bilinear")
    node.attributes["mode"] = ir.AttrString("mode", newer.get(mode, mode))
    return True


def _group_norm(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    """Repeat scale and bias per group to one per channel."""
    numbers = {"groups": int_attribute(node, "num_groups", 1), "one": 1, "all": -1}
    groups, one, every = (
        shared_constant(graph, f"opset.{name}_{number}", np.array([number], np.int64))
        for name, number in numbers.items()
    )
    channels = insert(node, "Shape", [node.inputs[0]], {"start": 1, "end": 2}).outputs[0]
    each = insert(node, "Div", [channels, groups]).outputs[0]
    target = insert(node, "Concat", [one, each], {"axis": 0}).outputs[0]
    for index in (1, 2):
        column = insert(node, "Unsqueeze", [node.inputs[index], one]).outputs[0]
        wide = insert(node, "Expand", [column, target]).outputs[0]
        node.replace_input_with(index, insert(node, "Reshape", [wide, every]).outputs[0])
    return True


def _replace_node(node: ir.Node, new: ir.Value) -> None:
    replace(node.outputs[0], new)
    if isinstance(node.graph, ir.Graph):
        node.graph.remove(node, safe=True)


# By operator: the opset since which its form is final, and the function that rewrites older nodes.
_FORMS: dict[str, tuple[int, Callable[[ir.Graph, ir.Node, int], bool]]] = {
    "BatchNormalization": (14, _batch_norm),
    "Clip": (11, _clip),
    "DFT": (20, _dft),
    "Dropout": (12, _dropout),
    "GridSample": (20, _grid_sample),
    "GroupNormalization": (21, _group_norm),
    **dict.fromkeys(["Hardmax", "LogSoftmax", "Softmax"], (13, _softmax)),
    "Pad": (11, _pad),
    **dict.fromkeys(
        [
            f"Reduce{kind}"
            for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
        ],
        (18, _axes_operand),
    ),
    "Resize": (11, _resize),
    "RoiAlign": (16, _roi_align),
    "Scatter": (11, _scatter),
    "Slice": (10, _slice),
    "Split": (18, _split),
    **dict.fromkeys(["Squeeze", "Unsqueeze"], (13, _axes_operand)),
    "TopK": (10, _top_k),
    "Upsample": (10, _upsample),
}
