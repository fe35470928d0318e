"""Random graphs of many types, shapes and opsets; each added node is tested in ONNX's evaluator.

They vary what ``random_graphs.py`` keeps constant: element types, empty and scalar tensors, unusual
broadcasts, operands at the limits of operators, old forms of operators, initializers that are also inputs or
outputs, and outputs that nodes read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

Array = npt.NDArray[Any]
_FLOATS = ("float32", "float32", "float16", "float64")
_INTS = ("int64", "int64", "int32", "uint8", "int8")
_SIZES = (0, 1, 1, 2, 3, 5)
_SPECIAL = (0.0, -0.0, 1.0, 2.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"))


@dataclass(slots=True)
class RandomSampler:
    """A graph under construction in which the content of every value is known."""

    rng: np.random.Generator
    opset: int
    contents: dict[str, Array] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, Array] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)

    def name(self) -> str:
        return f"v{len(self.contents)}_{len(self.nodes)}"

    def chance(self, of: float) -> bool:
        return bool(self.rng.random() < of)

    def pick(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def any(self, kinds: str = "fiub") -> str:
        """Return a value of one of the given kinds of types; add a constant if none exists."""
        fitting = [name for name, array in self.contents.items() if array.dtype.kind in kinds]
        return self.pick(fitting) if fitting and self.chance(0.9) else self.constant(self.array(kinds[0]))

    def array(self, kind: str, shape: tuple[int, ...] | None = None) -> Array:
        """Draw an array; floats are often special values, integers are small."""
        if shape is None:
            shape = tuple(self.pick(_SIZES) for _ in range(int(self.rng.integers(0, 4))))
        if kind == "b":
            return np.asarray(self.rng.random(shape) < 0.5)
        if kind in "iu":
            return np.asarray(self.rng.integers(0, 5, shape)).astype(self.pick(_INTS))
        if self.chance(0.3):
            return np.asarray(self.rng.choice(_SPECIAL, shape)).astype(self.pick(_FLOATS))
        return np.asarray(self.rng.standard_normal(shape)).astype(self.pick(_FLOATS))

    def constant(self, array: Array) -> str:
        """Add a constant as a node, an initializer, or an initializer that is also an input."""
        name = self.name()
        self.contents[name] = array
        if self.chance(0.4):
            self.nodes.append(make_node("Constant", (), [name], {"value": ir.tensor(array)}))
        else:
            self.constants[name] = array
            if self.chance(0.1):
                self.inputs[name] = array
        return name

    def ints(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def add(self, op: str, *operands: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """Add a node if it runs on the values of its operands."""
        names = [f"{self.name()}_{index}" for index in range(outputs)]
        node = make_node(op, operands, names, attributes)
        held = {name: self.contents[name] for name in operands if name}
        results = run_node(node, held, self.opset)
        if results is None:
            return []
        self.nodes.append(node)
        for name, array in zip(names, results, strict=True):
            self.contents[name] = array
        self.made += names
        return names


def run_node(node: onnx.NodeProto, held: dict[str, Array], opset: int) -> list[Array] | None:
    """Run one node and return its outputs, or None if it fails or returns no tensors."""
    typed = [described(name, array, [None] * array.ndim) for name, array in held.items()]
    returned = [onnx.ValueInfoProto(name=name) for name in node.output]
    model = make_model(onnx.GraphProto(name="one", node=[node], input=typed, output=returned), opset)
    try:
        with np.errstate(all="ignore"):
            found = [np.asarray(result) for result in ReferenceEvaluator(model).run(None, held)]
    except Exception:  # noqa: BLE001 -- the evaluator's operators raise whatever numpy does
        return None
    fine = all(array.size < 200 and array.ndim < 6 and array.dtype.kind in "fiub" for array in found)
    return found if fine else None


def make_node(
    op: str, operands: Sequence[str], names: Sequence[str], attributes: dict[str, Any]
) -> onnx.NodeProto:
    values = [ir.val(name) if name else None for name in operands]
    made = ir.node(op, values, attributes, outputs=[ir.val(name) for name in names])
    return ir.serde.serialize_node(made)


def described(name: str, array: Array, dims: Sequence[int | str | None]) -> onnx.ValueInfoProto:
    return ir.serde.serialize_value(ir.val(name, ir.DataType.from_numpy(array.dtype), dims))


def make_model(graph: onnx.GraphProto, opset: int) -> onnx.ModelProto:
    imports = [onnx.OperatorSetIdProto(domain="", version=opset)]
    return onnx.ModelProto(ir_version=10, graph=graph, opset_import=imports)


def _broadcastable(draw: RandomSampler, like: str) -> str:
    """Return a constant of a value's type whose shape broadcasts with the value's in unusual ways."""
    array = draw.contents[like]
    shape = [size if draw.chance(0.5) else 1 for size in array.shape][int(draw.rng.integers(0, 2)) :]
    shape = ([draw.pick((1, 2))] if draw.chance(0.2) else []) + shape
    return draw.constant(draw.array(array.dtype.kind, tuple(shape)).astype(array.dtype))


def _unary(draw: RandomSampler) -> None:
    op = draw.pick(("Neg", "Abs", "Sqrt", "Reciprocal", "Floor", "Sign", "Identity", "Sigmoid", "Not", "Exp"))
    draw.add(op, draw.any("b" if op == "Not" else "f"))


def _binary(draw: RandomSampler) -> None:
    op = draw.pick(
        ("Add", "Sub", "Mul", "Div", "Min", "Max", "Equal", "Less", "GreaterOrEqual", "Pow", "Mod")
    )
    x = draw.any("fi")
    y = _broadcastable(draw, x)
    whole = draw.contents[x].dtype.kind in "iu"
    if whole and op in ("Div", "Mod", "Pow") and not draw.contents[y].all():
        return
    attributes = {"fmod": 1} if op == "Mod" and not whole else {}
    draw.add(op, *((x, y) if draw.chance(0.5) else (y, x)), **attributes)


def _cast(draw: RandomSampler) -> None:
    x = draw.any()
    kind = draw.pick((*_FLOATS, *_INTS, "bool"))
    array = draw.contents[x]
    if np.dtype(kind).kind in "iu" and array.dtype.kind in "fiu":
        numbers = array.astype(np.float64)
        if not (np.isfinite(numbers) & (numbers >= 0) & (numbers < 100)).all():
            return  # the result of such a cast depends on the runtime
    draw.add("Cast", x, to=int(ir.DataType.from_numpy(np.dtype(kind))))


def _attributes(name: str, numbers: list[int]) -> dict[str, Any]:
    """Return an attribute, or none if it would be an empty list, which has no type."""
    return {name: numbers} if numbers else {}


def _layout(draw: RandomSampler) -> None:
    x = draw.any()
    rank, sizes = draw.contents[x].ndim, draw.contents[x].shape
    axis = int(draw.rng.integers(-rank - 1, rank + 1))
    match draw.pick(("Transpose", "Unsqueeze", "Squeeze", "Flatten", "Reshape", "Reshape", "Back")):
        case "Transpose":
            draw.add("Transpose", x, **_attributes("perm", draw.rng.permutation(rank).tolist()))
        case "Unsqueeze":
            draw.add("Unsqueeze", x, draw.ints(axis))
        case "Squeeze":
            draw.add("Squeeze", x, *([draw.ints(axis)] if draw.chance(0.6) else []))
        case "Flatten":
            draw.add("Flatten", x, axis=axis)
        case "Back":
            turned = draw.add("Transpose", x)
            draw.add("Transpose", *turned) if turned else None
        case _:
            target = [draw.pick((0, -1, size)) for size in draw.rng.permutation(sizes).tolist()]
            draw.add("Reshape", x, draw.ints(*target), **({"allowzero": 1} if draw.chance(0.2) else {}))


def _part(draw: RandomSampler) -> None:
    x = draw.any()
    rank = draw.contents[x].ndim
    axis = int(draw.rng.integers(-rank, rank)) if rank else 0
    match draw.pick(("Slice", "Slice", "Gather", "Split", "Concat", "Tile", "Expand", "ScatterND")):
        case "Slice":
            bounds = [draw.ints(draw.pick((-9, -2, -1, 0, 1, 2, 2**62))) for _ in range(2)]
            draw.add("Slice", x, *bounds, draw.ints(axis), draw.ints(draw.pick((-2, -1, 1, 1, 2))))
        case "Gather":
            indices = draw.rng.integers(-1, 1, (2,) * int(draw.rng.integers(0, 3)))
            draw.add("Gather", x, draw.constant(np.asarray(indices, np.int64)), axis=axis)
        case "Split":
            parts = {"num_outputs": 2} if draw.opset >= 18 else {}
            if rank and draw.contents[x].shape[axis] % 2 == 0:
                draw.add("Split", x, axis=axis, outputs=2, **parts)
        case "Concat":
            empty = np.zeros_like(draw.contents[x]).take([], axis) if rank else None
            other = draw.constant(empty) if empty is not None and draw.chance(0.5) else x
            draw.add("Concat", x, other, axis=axis)
        case "Tile":
            draw.add("Tile", x, draw.ints(*[draw.pick((0, 1, 1, 2)) for _ in range(rank)]))
        case "Expand":
            draw.add("Expand", x, draw.ints(*[draw.pick((1, 1, 2)) for _ in range(rank + 1)]))
        case _:
            if rank and draw.contents[x].shape[0]:
                rows = draw.constant(draw.contents[x][:1].copy())
                draw.add("ScatterND", x, draw.constant(np.zeros((1, 1), np.int64)), rows)


def _reduce(draw: RandomSampler) -> None:
    x = draw.any("fi")
    op = draw.pick(("ReduceSum", "ReduceMax", "ReduceProd", "ReduceMean", "ReduceMin"))
    rank = draw.contents[x].ndim
    axes = [int(draw.rng.integers(-rank, rank))] if rank and draw.chance(0.7) else []
    keep = {"keepdims": int(draw.chance(0.5))}
    if op != "ReduceSum" and draw.opset < 18:
        draw.add(op, x, **keep, **_attributes("axes", axes))
    elif draw.chance(0.8):
        noop = {"noop_with_empty_axes": 1} if draw.chance(0.2) else {}
        draw.add(op, x, *([draw.ints(*axes)] if axes or draw.chance(0.5) else []), **keep, **noop)


def _sizes(draw: RandomSampler) -> None:
    """Append shape arithmetic that computes a shape."""
    x = draw.any()
    for shape in draw.add("Shape", x, **({"start": -2} if draw.opset >= 15 and draw.chance(0.3) else {})):
        other = draw.add(draw.pick(("Max", "Min", "Mul", "Add")), shape, draw.ints(draw.pick((1, 2))))
        if draw.chance(0.5):
            draw.add("ConstantOfShape", *other)
        else:
            draw.add("Reshape", x, shape)
            draw.add("Expand", draw.constant(draw.array("f", ())), *other)


def _optional(draw: RandomSampler) -> None:
    x = draw.any("f")
    array = draw.contents[x]
    bound = draw.constant(np.asarray(0.5, array.dtype))
    match draw.pick(("Clip", "Where", "Dropout", "Quantize")):
        case "Clip":
            draw.add("Clip", x, *(("", bound) if draw.chance(0.5) else (bound,)))
        case "Where":
            seen = draw.constant(draw.array("b", array.shape[-1:]))
            draw.add("Where", seen, x, _broadcastable(draw, x))
        case "Dropout":
            draw.add("Dropout", x, outputs=1 + int(draw.chance(0.5)))
        case _:
            scale = draw.constant(np.asarray(0.1, np.float32))
            zero = draw.constant(np.asarray(draw.pick((0, 3)), draw.pick(("int8", "uint8"))))
            if array.dtype == np.float32 and np.isfinite(array).all():
                for quantized in draw.add("QuantizeLinear", x, scale, zero):
                    for back in draw.add("DequantizeLinear", quantized, scale, zero):
                        draw.add("QuantizeLinear", back, scale, zero)


_KINDS: tuple[Callable[[RandomSampler], None], ...] = (
    _unary, _binary, _binary, _cast, _cast, _layout, _layout, _part, _part, _reduce, _sizes, _optional
)  # fmt: skip


def typed_model(seed: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Draw a model and its inputs."""
    rng = np.random.default_rng(seed)
    draw = RandomSampler(rng, int(rng.integers(14, 25)))
    for index in range(int(rng.integers(1, 3))):
        name = f"x{index}"
        draw.contents[name] = draw.inputs[name] = draw.array(draw.pick("ffib"))
    for _ in range(int(rng.integers(2, 14))):
        draw.pick(_KINDS)(draw)
    names = dict.fromkeys([draw.pick([*draw.made, *draw.inputs]) for _ in range(3)] + draw.made[-1:])
    if draw.constants and draw.chance(0.3):
        names |= {draw.pick(list(draw.constants)): None}
    returned = [name for name in names if name not in draw.inputs] or draw.add("Identity", "x0")
    graph = onnx.GraphProto(
        name="typed",
        node=draw.nodes,
        input=[_info(draw, name, named=0.5) for name in draw.inputs],
        output=[_info(draw, name) for name in returned],
        initializer=[make_tensor(name, array) for name, array in draw.constants.items()],
    )
    return make_model(graph, draw.opset), draw.inputs


def make_tensor(name: str, array: Array) -> onnx.TensorProto:
    return ir.serde.serialize_tensor(ir.tensor(array, name=name))


def _info(draw: RandomSampler, name: str, *, named: float = 1.0) -> onnx.ValueInfoProto:
    """Return the info of an input or output; an axis of size > 0 may be dynamic, named by its size."""
    array = draw.contents[name]
    dims = [f"d{size}" if size and draw.chance(named) else size for size in array.shape]
    return described(name, array, dims)
