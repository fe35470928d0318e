"""Random graphs over the operators of ONNX, of opsets 7 to 25; each node runs in onnxruntime as it is drawn.

``random_typed_graphs.py`` draws few operators with odd types and shapes; here nearly all operators that
onnxruntime has on the CPU are drawn. Values stay small, and operators whose results jump read values that no
rounding changes, so that equal graphs give equal results within rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto
from random_typed_graphs import described, make_model, make_node, make_tensor

Array = npt.NDArray[Any]
OPSETS = range(7, 26)
LARGEST = 50.0  # of a value, so that errors are not multiplied
_MOST = 600  # elements
_UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp"),
    *(
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "LeakyRelu",
        "Log",
        "Mish",
        "Neg",
        "Reciprocal",
        "Relu",
    ),
    *("Selu", "Shrink", "Sigmoid", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh"),
    *("ThresholdedRelu",),
)
_STEPS = ("Ceil", "Floor", "Round", "Sign", "IsNaN", "IsInf", "Not", "BitwiseNot")
_BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "PRelu", "Min", "Max", "Mean", "Sum", "Add", "Mul")
_COMPARED = ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Mod")
_LOGICAL = ("And", "Or", "Xor")
_BITS = ("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor")
_REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
    *("ReduceProd", "ReduceSum", "ReduceSumSquare"),
)
_POOLS = ("AveragePool", "MaxPool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
_MOVES = frozenset(
    {
        *("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Concat"),
        *("Split", "Slice", "Gather", "GatherElements", "GatherND", "Pad", "DepthToSpace", "SpaceToDepth"),
        *("Shape", "Size", "ConstantOfShape", "Where", "ScatterElements", "ScatterND", "Trilu", "Neg", "Abs"),
        *("Relu", "Max", "Min", "MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "Compress", "EyeLike"),
        *(
            "ReverseSequence",
            "NonZero",
            "Unique",
            "OneHot",
            "Range",
            "Equal",
            "Greater",
            "Less",
            "Not",
            "And",
        ),
        *("GreaterOrEqual", "LessOrEqual", "Or", "Xor", "ArgMax", "ArgMin", "TopK", "Ceil", "Floor", "Round"),
        *("Sign", "IsNaN", "IsInf", "Cast", "CastLike", "Hardmax", "Dropout", "Clip", "Constant", "Mod"),
        *(*_BITS, "BitwiseNot", "QuantizeLinear", "MatMulInteger", "ConvInteger", "If"),
    }
)
_JUMPS = frozenset(
    {
        *(*_STEPS, *_COMPARED, "ArgMax", "ArgMin", "TopK", "Hardmax", "NonZero", "Unique", "QuantizeLinear"),
        *("DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv", "OneHot"),
    }
)


@dataclass
class RandomOperators:
    """A graph under construction; ``values`` holds what onnxruntime computed."""

    rng: np.random.Generator
    opset: int
    values: dict[str, Array] = field(default_factory=dict)
    exact: set[str] = field(default_factory=set)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)

    def chance(self, of: float) -> bool:
        return bool(self.rng.random() < of)

    def pick(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def any(self, kinds: str = "f", ranks: tuple[int, ...] = (0, 1, 2, 3, 4), *, exact: bool = False) -> str:
        """Return a value, of the last ones more often; a constant if none fits."""
        fitting = [
            name
            for name, array in self.values.items()
            if array.dtype.kind in kinds
            and array.ndim in ranks
            and array.size
            and (not exact or name in self.exact)
        ]
        if not fitting:
            shape = tuple(self.pick((1, 2, 3, 4)) for _ in range(self.pick(ranks)))
            return self.weight(self.random(shape, kinds[0]))
        return str(self.pick(fitting[-4:] if self.chance(0.6) else fitting))

    def random(self, shape: tuple[int, ...], kind: str = "f") -> Array:
        if kind == "b":
            return np.asarray(self.rng.random(shape) < 0.5)
        if kind in "iu":
            return np.asarray(self.rng.integers(0, 4, shape), np.int64 if kind == "i" else np.uint8)
        return np.asarray(self.rng.standard_normal(shape), np.float32)

    def weight(self, array: Array) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = self.values[name] = array
        self.exact.add(name)
        return name

    def ints(self, *numbers: int) -> str:
        return self.weight(np.array(numbers, np.int64))

    def knows(self, op: str, attribute: str) -> bool:
        return attribute in onnx.defs.get_schema(op, self.opset).attributes

    def add(self, op: str, *operands: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """Add a node if this opset has it and onnxruntime runs it; attributes it lacks are left out."""
        try:
            schema = onnx.defs.get_schema(op, self.opset)
        except Exception:  # noqa: BLE001 -- a SchemaError of C++
            return []
        held = {key: value for key, value in attributes.items() if key in schema.attributes}
        if op in _JUMPS and not self.exact.issuperset({name for name in operands if name}):
            return []
        names = [f"v{len(self.made)}_{index}" for index in range(outputs)]
        node = make_node(op, operands, names, held)
        feed = {name: self.values[name] for name in operands if name}
        found = run_nodes([node], feed, names, self.opset)
        if found is None or any(not fine(array) for array in found):
            return []
        self.nodes.append(node)
        for name, array in zip(names, found, strict=True):
            self.values[name] = array
            self.made.append(name)
            if op in _MOVES and self.exact.issuperset(feed):
                self.exact.add(name)
        return names

    def axes(self, op: str, axes: list[int]) -> tuple[list[str], dict[str, Any]]:
        """Axes as an attribute or as an input, as this opset has them."""
        return ([], {"axes": axes}) if self.knows(op, "axes") else ([self.ints(*axes)], {})


def fine(array: Array) -> bool:
    if array.size > _MOST or array.dtype.kind not in "fiub":
        return False
    return array.dtype.kind != "f" or bool(np.isfinite(array).all() and (np.abs(array) <= LARGEST).all())


def sizes(array: Array, *, dynamic: bool = False) -> list[int | str | None]:
    return [f"d{axis}_{size}" if dynamic and size > 1 else size for axis, size in enumerate(array.shape)]


def typed(name: str, dtype: ir.DataType, shape: list[int | str | None] | None = None) -> onnx.ValueInfoProto:
    return ir.serde.serialize_value(ir.val(name, dtype, shape))


def nested_node(
    op: str, operands: list[str], name: str, bodies: dict[str, onnx.GraphProto]
) -> onnx.NodeProto:
    node = make_node(op, operands, [name], {})
    for key, body in bodies.items():
        node.attribute.append(onnx.AttributeProto(name=key, type=onnx.AttributeProto.GRAPH, g=body))
    return node


def options(level: str = "ORT_DISABLE_ALL") -> Any:
    found = ort.SessionOptions()
    found.log_severity_level = 4
    found.intra_op_num_threads = 1
    found.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    return found


def run_nodes(
    nodes: list[onnx.NodeProto], feed: dict[str, Array], names: list[str], opset: int
) -> list[Array] | None:
    inputs = [described(name, array, sizes(array)) for name, array in feed.items()]
    returned = [onnx.ValueInfoProto(name=name) for name in names]
    model = make_model(onnx.GraphProto(name="g", node=nodes, input=inputs, output=returned), opset)
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), options(), providers=["CPUExecutionProvider"]
        )
        return [np.asarray(array) for array in session.run(None, feed)]
    except Exception:  # noqa: BLE001 -- onnxruntime's errors have no stable names
        return None


Recipe = Callable[[RandomOperators], object]


def _broadcast(draw: RandomOperators, x: str, kind: str = "f") -> str:
    shape = draw.values[x].shape
    if draw.chance(0.3):
        same = [
            name for name, array in draw.values.items() if array.shape == shape and array.dtype.kind == kind
        ]
        if same:
            return str(draw.pick(same))
    if draw.chance(0.5):
        shape = tuple(size if draw.chance(0.6) else 1 for size in shape)[int(draw.chance(0.3)) :]
    return draw.weight(draw.random(shape, kind).astype(draw.values[x].dtype))


def _pair(draw: RandomOperators, op: str, kind: str = "f") -> object:
    x = draw.any(kind, exact=op in _JUMPS)
    y = _broadcast(draw, x, kind)
    if op == "PRelu" or draw.chance(0.7):
        return draw.add(op, x, y, fmod=1, direction="LEFT")
    return draw.add(op, y, x, fmod=1, direction="LEFT")


def _reduce(draw: RandomOperators, op: str) -> object:
    x = draw.any("f", (1, 2, 3, 4))
    rank = draw.values[x].ndim
    chosen = sorted({int(draw.rng.integers(-rank, rank)) % rank for _ in range(draw.pick((1, 1, 2)))})
    axes, more = draw.axes(op, [axis - rank if draw.chance(0.5) else axis for axis in chosen])
    return draw.add(op, x, *(axes if draw.chance(0.9) else []), keepdims=int(draw.chance(0.6)), **more)


def _pooled(draw: RandomOperators, op: str) -> object:
    x = draw.any("f", (3, 4))
    rank = draw.values[x].ndim - 2
    more: dict[str, Any] = {}
    if not op.startswith("Global"):
        more = {"kernel_shape": [draw.pick((1, 2, 3)) for _ in range(rank)]}
        if draw.chance(0.5):
            more["strides"] = [draw.pick((1, 2)) for _ in range(rank)]
        if draw.chance(0.4):
            more["pads"] = [draw.pick((0, 1)) for _ in range(2 * rank)]
        if draw.chance(0.3):
            more |= {"ceil_mode": 1, "count_include_pad": int(draw.chance(0.5))}
    return draw.add(op, x, **more)


def _layout(draw: RandomOperators, op: str) -> object:
    kinds = "fib"
    x = draw.any(kinds, (1, 2, 3, 4), exact=op in _JUMPS)
    array, rank = draw.values[x], draw.values[x].ndim
    axis = int(draw.rng.integers(-rank, rank))
    match op:
        case "Transpose":
            back = draw.add(op, x, perm=draw.rng.permutation(rank).tolist())
            return draw.add(op, *back, perm=draw.rng.permutation(rank).tolist()) if draw.chance(0.3) else back
        case "Reshape":
            sizes = [1, *draw.rng.permutation(array.shape).tolist()][int(draw.chance(0.5)) :]
            if draw.chance(0.5):
                sizes[int(draw.rng.integers(len(sizes)))] = -1
            return draw.add(op, x, draw.ints(*sizes))
        case "Flatten":
            return draw.add(op, x, axis=max(axis, 0))
        case "Squeeze":
            ones = [place for place, size in enumerate(array.shape) if size == 1]
            axes, more = draw.axes(op, ones[:1])
            return draw.add(op, x, *axes, **more) if ones else None
        case "Unsqueeze":
            axes, more = draw.axes(op, [max(axis, 0)])
            return draw.add(op, x, *axes, **more)
        case "Expand":
            return draw.add(op, x, draw.ints(2, *[1] * rank))
        case "Tile":
            return draw.add(op, x, draw.ints(*[draw.pick((1, 1, 2)) for _ in range(rank)]))
        case "Concat":
            return draw.add(op, x, draw.pick((x, draw.weight(array.copy()))), axis=axis)
        case "Split":
            size = array.shape[axis]
            if size < 2:
                return None
            parts = [1, size - 1]
            if draw.knows(op, "split"):
                return draw.add(op, x, axis=axis, split=parts, outputs=2)
            return draw.add(op, x, draw.ints(*parts), axis=axis, outputs=2)
        case "Slice":
            start, end, step = draw.pick((0, 1, -1)), draw.pick((2, 100, -1)), draw.pick((1, 1, 2, -1))
            if draw.knows(op, "starts"):
                return draw.add(op, x, starts=[start], ends=[end], axes=[max(axis, 0)])
            if step < 0:
                start, end = 100, -100
            return draw.add(op, x, draw.ints(start), draw.ints(end), draw.ints(axis), draw.ints(step))
        case "Pad":
            pads = draw.rng.integers(0, 2, 2 * rank).tolist()
            mode = draw.pick(("constant", "constant", "reflect", "edge"))
            if draw.knows(op, "pads"):
                return draw.add(op, x, pads=pads, mode=mode)
            return draw.add(op, x, draw.ints(*pads), mode=mode)
        case "Gather":
            rows = draw.rng.integers(-1, 1, draw.pick(((), (2,), (2, 1))))
            return draw.add(op, x, draw.weight(np.asarray(rows, np.int64)), axis=axis)
        case "GatherElements":
            return draw.add(op, x, draw.weight(np.zeros(array.shape, np.int64)), axis=axis)
        case "GatherND":
            return draw.add(op, x, draw.weight(np.zeros((2, draw.pick((1, rank))), np.int64)))
        case "ScatterElements":
            rows = draw.weight(array.take([0], axis).copy())
            zeros = draw.weight(np.zeros(draw.values[rows].shape, np.int64))
            return draw.add(op, x, zeros, rows, axis=axis)
        case "ScatterND":
            rows = draw.weight(array[:1].copy())
            return draw.add(op, x, draw.weight(np.zeros((1, 1), np.int64)), rows)
        case "Compress":
            return draw.add(op, x, draw.weight(np.array([True, False, True][: array.shape[axis]])), axis=axis)
        case "DepthToSpace" | "SpaceToDepth":
            return draw.add(op, draw.any("f", (4,)), blocksize=2, mode=draw.pick(("DCR", "CRD")))
        case "Trilu":
            return draw.add(op, x, upper=int(draw.chance(0.5)))
        case "Where":
            seen = draw.weight(draw.random(array.shape[-1:], "b"))
            return draw.add(op, seen, x, _broadcast(draw, x, array.dtype.kind))
        case "ReverseSequence":
            if rank < 2:
                return None
            return draw.add(op, x, draw.weight(np.ones(array.shape[1], np.int64)), batch_axis=1, time_axis=0)
        case "TopK":
            count = draw.ints(1)
            return draw.add(op, x, count, axis=axis, outputs=2, largest=int(draw.chance(0.5)))
        case "Unique":
            return draw.add(op, x, outputs=1)
        case "Cast":
            kind = draw.pick((TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16))
            if x in draw.exact and array.dtype.kind in "ib":
                kind = draw.pick((TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL))
            return draw.add("Cast", *draw.add("Cast", x, to=kind), to=TensorProto.FLOAT)
        case "CastLike":
            return draw.add(op, x, draw.any("f"))
        case "OneHot":
            index = draw.any("i", (1, 2), exact=True)
            depth = draw.weight(np.array(4, np.int64))
            return draw.add(op, index, depth, draw.weight(np.array([0, 1], np.float32)), axis=-1)
        case "CumSum":
            return draw.add(op, x, draw.weight(np.array(axis, np.int64)), reverse=int(draw.chance(0.3)))
        case "ConstantOfShape" | "Size":
            shape = draw.add("Shape", x)
            return draw.add(op, *(shape if op == "ConstantOfShape" else [x]))
        case "Range":
            end = draw.add("Gather", *draw.add("Shape", x), draw.weight(np.array(0, np.int64)))
            zero, one = (draw.weight(np.array(number, np.int64)) for number in (0, 1))
            return draw.add(op, zero, *end, one) if end else None
        case "Dropout":
            return draw.add(op, draw.any("f"))
        case "Clip":
            low, high = -0.5, 1.5
            x = draw.any("f")
            if draw.knows(op, "min"):
                return draw.add(op, x, min=low, max=high)
            bounds = [draw.weight(np.array(number, draw.values[x].dtype)) for number in (low, high)]
            return draw.add(op, x, *(bounds if draw.chance(0.6) else ["", bounds[1]]))
        case _:
            return draw.add(op, x, axis=axis)


def _softmax(draw: RandomOperators, op: str) -> object:
    x = draw.any("f", (1, 2, 3, 4), exact=op in _JUMPS)
    rank = draw.values[x].ndim
    return draw.add(op, x, axis=draw.pick((-1, rank - 1, 0) if draw.opset >= 11 else (rank - 1, 0)), p=2)


def _product(draw: RandomOperators, op: str) -> object:
    x = draw.any("f", (2,) if op == "Gemm" else (2, 3, 4))
    inner, out = draw.values[x].shape[-1], draw.pick((1, 2, 5))
    turned = op == "Gemm" and draw.chance(0.5)
    w = draw.weight(draw.random((out, inner) if turned else (inner, out)) * np.float32(0.5))
    if op == "Einsum":
        return draw.add(op, x, w, equation="...ij,jk->...ik")
    bias = (
        [draw.weight(draw.random((out,)))] if op == "Gemm" and (draw.chance(0.6) or draw.opset < 11) else []
    )
    found = draw.add(
        op, x, w, *bias, transB=int(turned), alpha=draw.pick((1.0, 0.5)), beta=draw.pick((1.0, 2.0))
    )
    if found and op == "MatMul" and draw.chance(0.6):
        return draw.add("Add", *found, draw.weight(draw.random((out,))))
    return found


def _conv(draw: RandomOperators, op: str) -> object:
    x = draw.any("f", (3, 4))
    array = draw.values[x]
    channels, rank, out = array.shape[1], array.ndim - 2, draw.pick((1, 2, 4))
    group = channels if draw.chance(0.3) else 1
    out = channels if group > 1 else out
    kernel = [draw.pick((1, 2, 3)) for _ in range(rank)]
    first, second = (channels, out // group) if op == "ConvTranspose" else (out, channels // group)
    w = draw.weight(draw.random((first, second, *kernel)) * np.float32(0.4))
    bias = [draw.weight(draw.random((out,)))] if draw.chance(0.6) else []
    more: dict[str, Any] = {"pads": [draw.pick((0, 1)) for _ in range(2 * rank)]} if draw.chance(0.5) else {}
    if draw.chance(0.4):
        more |= {"strides": [draw.pick((1, 2)) for _ in range(rank)], "dilations": [draw.pick((1, 2))] * rank}
    found = draw.add(op, x, w, *bias, group=group, kernel_shape=kernel, **more)
    if found and draw.chance(0.3):
        return _normed(draw, "BatchNormalization", found[0])
    return found


def _normed(draw: RandomOperators, op: str, x: str | None = None) -> object:
    x = x or draw.any("f", (3, 4) if op != "LayerNormalization" else (2, 3, 4))
    array = draw.values[x]
    channels = array.shape[-1] if op in ("LayerNormalization", "RMSNormalization") else array.shape[1]
    scale, bias = draw.weight(draw.random((channels,)) + np.float32(1)), draw.weight(draw.random((channels,)))
    match op:
        case "BatchNormalization":
            variance = draw.weight(np.abs(draw.random((channels,))) + np.float32(0.5))
            return draw.add(op, x, scale, bias, draw.weight(draw.random((channels,))), variance, epsilon=1e-3)
        case "RMSNormalization":
            return draw.add(op, x, scale, epsilon=1e-3)
        case "GroupNormalization":
            groups = {"num_groups": 1}
            if draw.opset < 21:
                scale, bias = (draw.weight(draw.random((1,))) for _ in range(2))
            return draw.add(op, x, scale, bias, epsilon=1e-3, **groups)
        case "LRN":
            return draw.add(op, x, size=3)
        case "MeanVarianceNormalization":
            return draw.add(op, draw.any("f", (4,)))
        case _:
            return draw.add(op, x, scale, bias, epsilon=1e-2)


def _by_parts(draw: RandomOperators, op: str) -> object:
    """The operations of which a norm or an activation is written without its operator."""
    x = draw.any("f", (2, 3))
    match op:
        case "layer norm":
            axes, more = draw.axes("ReduceMean", [-1] if draw.opset >= 11 else [draw.values[x].ndim - 1])
            centred = draw.add("Sub", x, *draw.add("ReduceMean", x, *axes, **more))
            squared = draw.add("Pow", *centred, draw.weight(np.array(2, np.float32))) if centred else []
            variance = draw.add("ReduceMean", *squared, *axes, **more) if squared else []
            eps = draw.weight(np.array(1e-2, np.float32))
            root = draw.add("Sqrt", *draw.add("Add", *variance, eps)) if variance else []
            normed = draw.add("Div", *centred, *root) if root else []
            scale = draw.weight(draw.random(draw.values[x].shape[-1:]))
            return draw.add("Mul", *normed, scale) if normed else None
        case "gelu":
            y = draw.add("Erf", *draw.add("Div", x, draw.weight(np.array(1.4142135, np.float32))))
            y = draw.add("Add", *y, draw.weight(np.array(1, np.float32))) if y else []
            y = draw.add("Mul", x, *y) if y else []
            return draw.add("Mul", *y, draw.weight(np.array(0.5, np.float32))) if y else None
        case _:
            return draw.add("Mul", x, *draw.add("Sigmoid", x))


def _quantized(draw: RandomOperators, op: str) -> object:
    x = draw.any("f", (2, 3, 4), exact=True)
    kind: Any = draw.pick((np.uint8, np.int8))
    scale, zero = draw.weight(np.array(draw.pick((0.1, 0.05)), np.float32)), draw.weight(np.array(3, kind))
    match op:
        case "QDQ":
            small = draw.add("QuantizeLinear", x, scale, zero)
            return draw.add("DequantizeLinear", *small, scale, zero) if small else None
        case "DynamicQuantizeLinear":
            small = draw.add(op, x, outputs=3)
            return draw.add("DequantizeLinear", *small) if small else None
        case _:
            small = draw.add("QuantizeLinear", x, scale, zero)
            if not small:
                return None
            inner = draw.values[x].shape[-1]
            w = draw.weight(draw.rng.integers(-5, 5, (inner, 3)).astype(np.int8))
            total = draw.add("MatMulInteger", *small, w, zero)
            return draw.add("Cast", *total, to=TensorProto.FLOAT) if total else None


def _resized(draw: RandomOperators, op: str) -> object:
    x = draw.any("f", (4,))
    factors = draw.weight(np.array([1, 1, draw.pick((2, 1.5)), draw.pick((2, 1))], np.float32))
    if op == "Upsample":
        if draw.opset == 7:
            return draw.add(
                op, x, scales=draw.weights[factors].tolist(), mode=draw.pick(("nearest", "linear"))
            )
        return draw.add(op, x, factors, mode=draw.pick(("nearest", "linear")))
    if draw.opset < 11:
        return draw.add(op, x, factors, mode=draw.pick(("nearest", "linear")))
    return draw.add(
        op,
        x,
        "" if draw.opset >= 13 else draw.weight(np.zeros(0, np.float32)),
        factors,
        mode=draw.pick(("nearest", "linear", "cubic")),
        coordinate_transformation_mode=draw.pick(("half_pixel", "asymmetric", "align_corners")),
    )


def _attention(draw: RandomOperators, op: str) -> object:
    heads = [draw.weight(draw.random((1, 2, 3, 4))) for _ in range(2)]
    x = draw.any("f", (4,))
    if draw.values[x].shape[0] != 1 or draw.values[x].shape[-1] != 4 or draw.values[x].shape[1] != 2:
        x = draw.weight(draw.random((1, 2, 3, 4)))
    return draw.add(op, x, *heads, is_causal=int(draw.chance(0.5)), softcap=draw.pick((0.0, 2.0)))


def _nested(draw: RandomOperators, op: str) -> object:
    """Control flow whose bodies read a value of the graph around them."""
    x = draw.any("f", (1, 2, 3))
    kind, shape = ir.DataType.from_numpy(draw.values[x].dtype), draw.values[x].shape
    w = draw.weight(draw.random(shape[-1:]).astype(draw.values[x].dtype))

    def body(name: str, ops: list[str], inputs: list[Any], first: str, more: list[Any]) -> onnx.GraphProto:
        nodes, last = [], first
        for index, each in enumerate(ops):
            nodes.append(make_node(each, [last, w], [f"{name}{len(draw.made)}_{index}"], {}))
            last = nodes[-1].output[0]
        nodes += more
        outs = [node.output[0] for node in more] + [last]
        results = [typed(out, ir.DataType.BOOL if out.endswith("c_out") else kind) for out in outs]
        return onnx.GraphProto(name=name, node=nodes, input=inputs, output=results)

    number = len(draw.nodes)
    name = f"v{len(draw.made)}_0"
    if op == "If":
        branches = {
            "then_branch": body(f"t{number}", ["Add", "Mul"], [], x, []),
            "else_branch": body(f"e{number}", ["Sub"], [], x, []),
        }
        operands = [draw.weight(np.array(draw.chance(0.5)))]
        node = nested_node(op, operands, name, branches)
    else:
        inputs = [
            typed(f"i{number}", ir.DataType.INT64, []),
            typed(f"c{number}", ir.DataType.BOOL, []),
            typed(f"s{number}", kind, list(shape)),
        ]
        still = make_node("Identity", [f"c{number}"], [f"{number}c_out"], {})
        operands = [
            draw.weight(np.array(2, np.int64)),
            "" if draw.chance(0.5) else draw.weight(np.array(True)),
            x,
        ]
        bodies = {"body": body(f"l{number}", ["Add"], inputs, f"s{number}", [still])}
        node = nested_node(op, operands, name, bodies)
    feed = {each: draw.values[each] for each in {*operands, x, w} if each}
    found = run_nodes([node], feed, [name], draw.opset)
    if found is None or not fine(found[0]):
        return None
    draw.nodes.append(node)
    draw.values[name] = found[0]
    draw.made.append(name)
    return name


def _each(recipe: Callable[[RandomOperators, str], object], *ops: str) -> dict[str, Recipe]:
    return {op: (lambda draw, op=op: recipe(draw, op)) for op in ops}  # type: ignore[misc]


RECIPES: dict[str, Recipe] = {
    **_each(lambda draw, op: draw.add(op, draw.any("f")), *_UNARY),
    **_each(
        lambda draw, op: draw.add(op, draw.any({"Not": "b", "BitwiseNot": "i"}.get(op, "f"), exact=True)),
        *_STEPS,
    ),
    **_each(_pair, *_BINARY, *_COMPARED),
    **_each(lambda draw, op: _pair(draw, op, "b"), *_LOGICAL),
    **_each(lambda draw, op: _pair(draw, op, "u" if op == "BitShift" else "i"), *_BITS),
    **_each(_reduce, *_REDUCTIONS),
    **_each(_pooled, *_POOLS),
    **_each(
        _layout,
        *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Concat", "Split"),
        *("Slice", "Gather", "GatherElements", "GatherND", "Pad", "DepthToSpace", "SpaceToDepth", "Shape"),
        *("Size", "ConstantOfShape", "Range", "OneHot", "Where", "Cast", "CastLike", "ScatterElements"),
        *("ScatterND", "Trilu", "EyeLike", "ReverseSequence", "NonZero", "Unique", "Compress", "CumSum"),
        *("TopK", "ArgMax", "ArgMin", "Dropout", "Clip"),
    ),
    **_each(_softmax, "Softmax", "LogSoftmax", "Hardmax", "LpNormalization"),
    **_each(_product, "MatMul", "Gemm", "Einsum"),
    **_each(_conv, "Conv", "ConvTranspose"),
    **_each(
        _normed,
        *("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"),
        *("RMSNormalization", "LRN", "MeanVarianceNormalization"),
    ),
    **_each(_by_parts, "layer norm", "gelu", "swish"),
    **_each(_quantized, "QDQ", "DynamicQuantizeLinear", "MatMulInteger"),
    **_each(_resized, "Resize", "Upsample"),
    **_each(_attention, "Attention"),
    **_each(_nested, "If", "Loop"),
}


def random_model(seed: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Draw a model and its inputs."""
    rng = np.random.default_rng(seed)
    draw = RandomOperators(rng, int(rng.integers(OPSETS.start, OPSETS.stop)))
    for index in range(draw.pick((1, 1, 2))):
        shape = tuple(draw.pick((1, 2, 3, 4, 4)) for _ in range(draw.pick((1, 2, 3, 4, 4))))
        name = f"x{index}"
        draw.values[name] = draw.random(shape)
        draw.exact.add(name)
        draw.inputs.append(name)
    names = list(RECIPES)
    wanted = draw.pick((2, 4, 8, 12))
    for _ in range(4 * wanted):
        if len(draw.nodes) >= wanted:
            break
        RECIPES[draw.pick(names)](draw)
    if not draw.made:
        draw.add("Identity", "x0")
    chosen = list(dict.fromkeys([draw.pick(draw.made), draw.made[-1]]))
    used = {name for node in draw.nodes for name in node.input}
    used |= {
        name for node in draw.nodes for part in node.attribute for each in part.g.node for name in each.input
    }
    dynamic = draw.chance(0.4)
    weights = {name: array for name, array in draw.weights.items() if name in used}
    graph = onnx.GraphProto(
        name="random",
        node=draw.nodes,
        input=[
            described(name, draw.values[name], sizes(draw.values[name], dynamic=dynamic))
            for name in draw.inputs
        ],
        output=[described(name, draw.values[name], [None] * draw.values[name].ndim) for name in chosen],
        initializer=[make_tensor(name, array) for name, array in weights.items()],
    )
    model = make_model(graph, draw.opset)
    model.ir_version = 3 if draw.opset < 9 and draw.chance(0.2) else 8 if draw.opset < 20 else 10
    if model.ir_version == 3:  # weights are inputs too
        model.graph.input.extend(described(name, array, sizes(array)) for name, array in weights.items())
    return model, {name: draw.values[name] for name in draw.inputs}
