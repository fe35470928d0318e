"""Random valid ONNX graphs as a hypothesis strategy.

Every tensor is float [2, 3], so that any value can be any operand. The graphs have branches, loops and scans
that read outer values, functions of the model, absent operands, sequences, unused results, constants as
nodes and as initializers, duplicates, and operators of an unknown domain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st

OPSET = 21
SHAPE = (2, 3)
FOREIGN, OWN = "nobody.knows", "its.own"

Draw = Callable[..., object]
_UNARY = ("Abs", "Neg", "Sigmoid", "Tanh", "Identity", "Relu", "Softplus", "Sign")
_BINARY = ("Add", "Sub", "Mul", "Min", "Max")


@dataclass(slots=True)
class Scope:
    """A graph under construction.

    Attributes:
        values: values that a node may read, including those of outer graphs.
        foreign: whether operators of other domains may occur.
        depth: number of outer graphs.
        numbers: counter for unique names.
    """

    draw: Draw
    values: list[ir.Value]
    foreign: bool
    depth: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)
    nodes: list[ir.Node] = field(default_factory=list)
    initializers: list[ir.Value] = field(default_factory=list)

    def op(
        self, op_type: str, *operands: ir.Value | None, domain: str = "", **attributes: object
    ) -> ir.Value:
        """Append a node with one output of the common shape."""
        return self.node(op_type, operands, attributes, domain)[0]

    def node(
        self,
        op_type: str,
        operands: tuple[ir.Value | None, ...],
        attributes: dict[str, object],
        domain: str = "",
        outputs: int = 1,
    ) -> list[ir.Value]:
        """Append a node."""
        node = ir.node(op_type, operands, attributes, domain=domain, num_outputs=outputs)  # type: ignore[arg-type]
        for value in node.outputs:
            value.name = f"v{next(self.numbers)}"
        self.nodes.append(node)
        return list(node.outputs)

    def given(self, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
        """Make an input of a subgraph."""
        return ir.val(f"v{next(self.numbers)}", dtype, shape)

    def any(self) -> ir.Value:
        """Draw one of the existing values."""
        return self.pick(self.values)

    def pick(self, choices: list[ir.Value]) -> ir.Value:
        """Draw one of several values."""
        chosen: ir.Value = self.draw(st.sampled_from(choices))  # type: ignore[assignment]
        return chosen

    def constant(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> ir.Value:
        """Make a constant, as a node or an initializer."""
        tensor = ir.tensor(array)
        if self.draw(st.booleans()):
            return self.op("Constant", value=tensor)
        name, kind = f"v{next(self.numbers)}", ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, type=kind, shape=ir.Shape(array.shape), const_value=tensor)
        self.initializers.append(value)
        return value

    def floats(self) -> ir.Value:
        """Make a constant of the common shape or one that broadcasts to it; few distinct constants."""
        shape = self.draw(st.sampled_from([SHAPE, (), (1,), (3,)]))
        number = self.draw(st.sampled_from([0.0, 1.0, -2.0, 0.5]))
        return self.constant(np.full(shape, number, np.float32))  # type: ignore[call-overload]

    def ints(self, *numbers: int) -> ir.Value:
        """Make a vector of integers."""
        return self.constant(np.array(numbers, np.int64))


def _unary(scope: Scope) -> ir.Value:
    return scope.op(str(scope.draw(st.sampled_from(_UNARY))), scope.any())


def _binary(scope: Scope) -> ir.Value:
    other = scope.floats() if scope.draw(st.booleans()) else scope.any()
    return scope.op(str(scope.draw(st.sampled_from(_BINARY))), scope.any(), other)


def _duplicate(scope: Scope) -> ir.Value:
    x = scope.any()
    return scope.op("Add", scope.op("Exp", scope.op("Neg", x)), scope.op("Exp", scope.op("Neg", x)))


def _there_and_back(scope: Scope) -> ir.Value:
    """Append a chain of layout changes and casts that has no effect in total."""
    x = scope.op("Transpose", scope.any(), perm=[1, 0])
    x = scope.op("Reshape", x, scope.ints(*((-1,) if scope.draw(st.booleans()) else (3, 1, 2))))
    x = scope.op("Reshape", x, scope.ints(3, 2))
    return scope.op("Cast", scope.op("Cast", scope.op("Transpose", x, perm=[1, 0]), to=11), to=1)


def _shape_arithmetic(scope: Scope) -> ir.Value:
    x = scope.any()
    size = scope.op("Gather", scope.op("Shape", x), scope.constant(np.array(0, np.int64)), axis=0)
    target = scope.op("Concat", scope.op("Unsqueeze", size, scope.ints(0)), scope.ints(-1), axis=0)
    return scope.op("Expand", scope.op("Reshape", x, target), scope.op("Shape", scope.any()))


def _optional_operands(scope: Scope) -> ir.Value:
    bound = scope.constant(np.array(0.75, np.float32))
    low, high = (bound, None) if scope.draw(st.booleans()) else (None, bound)
    return scope.op("Clip", scope.any(), low, high)


def _unused_results(scope: Scope) -> ir.Value:
    kept, unused = scope.node("Split", (scope.op("Concat", scope.any(), scope.any(), axis=0),),
                              {"num_outputs": 2, "axis": 0}, outputs=2)  # fmt: skip
    scope.op("Exp", unused)
    return kept


def _sequence(scope: Scope) -> ir.Value:
    made = scope.op("SequenceConstruct", scope.any(), scope.any())
    if scope.draw(st.booleans()):
        made = scope.op("SequenceInsert", made, scope.any())
    return scope.op("SequenceAt", made, scope.constant(np.array(1, np.int64)))


def _function(scope: Scope) -> ir.Value:
    return scope.op("Twice", scope.any(), domain=OWN)


def _foreign(scope: Scope) -> ir.Value:
    if not scope.foreign:
        return _unary(scope)
    odd = scope.node("Odd", (scope.any(), None, scope.any()), {"k": 3, "words": ["a", "b"]}, FOREIGN, 2)
    return scope.op("Identity", odd[scope.draw(st.integers(0, 1))])  # type: ignore[call-overload]


def _branch(scope: Scope) -> ir.Value:
    total = scope.op("ReduceSum", scope.any(), keepdims=0)
    condition = scope.op("Greater", total, scope.constant(np.array(0, np.float32)))
    return scope.op("If", condition, then_branch=body(scope, [], []), else_branch=body(scope, [], []))


def _loop(scope: Scope) -> ir.Value:
    step, keep = scope.given(ir.DataType.INT64, []), scope.given(ir.DataType.BOOL, [])
    carried = scope.given(ir.DataType.FLOAT, SHAPE)
    graph = body(scope, [step, keep, carried], [carried], first=lambda inner: inner.op("Identity", keep))
    trips = scope.constant(np.array(2, np.int64))
    return scope.op("Loop", trips, scope.constant(np.array(True)), scope.any(), body=graph)


def _scan(scope: Scope) -> ir.Value:
    state, row = scope.given(ir.DataType.FLOAT, SHAPE), scope.given(ir.DataType.FLOAT, SHAPE[1:])
    graph = body(scope, [state, row], [state], last=lambda inner: inner.op("Neg", row))
    attributes = {"body": graph, "num_scan_inputs": 1}
    last, rows = scope.node("Scan", (scope.any(), scope.any()), attributes, outputs=2)
    return scope.op("Add", last, rows)


_SIMPLE = (_unary, _binary, _duplicate, _there_and_back, _shape_arithmetic, _optional_operands,
           _unused_results, _sequence, _function, _foreign)  # fmt: skip
_NESTED = (_branch, _loop, _scan)
_MAX_DEPTH = 2


def grow(scope: Scope, most: int) -> ir.Value:
    """Append up to ``most`` pieces and return a value that a node of this graph computed."""
    kinds = _SIMPLE if scope.depth >= _MAX_DEPTH else (*_SIMPLE, *_NESTED)
    for _ in range(scope.draw(st.integers(1, most))):  # type: ignore[call-overload]
        scope.values.append(scope.draw(st.sampled_from(kinds))(scope))  # type: ignore[operator]
    return scope.op("Identity", scope.values[-1])


def body(
    outer: Scope,
    inputs: list[ir.Value],
    readable: list[ir.Value],
    *,
    first: Callable[[Scope], ir.Value] | None = None,
    last: Callable[[Scope], ir.Value] | None = None,
) -> ir.Graph:
    """Make a subgraph; ``first`` and ``last`` make outputs before and after its own outputs."""
    scope = Scope(outer.draw, [*outer.values, *readable], outer.foreign, outer.depth + 1, outer.numbers)
    outputs = [_typed(first(scope), ir.DataType.BOOL, [])] if first else []
    outputs.append(_typed(grow(scope, 3), ir.DataType.FLOAT, SHAPE))
    outputs += [_typed(last(scope), ir.DataType.FLOAT, SHAPE[1:])] if last else []
    return ir.Graph(inputs, outputs, nodes=scope.nodes, initializers=scope.initializers, name="body")


def _typed(value: ir.Value, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
    """Set the type and shape of an output, which onnxruntime's Scan requires."""
    value.dtype, value.shape = dtype, ir.Shape(shape)
    return value


def _twice() -> ir.Function:
    x = ir.val("x")
    node = ir.node("Add", [x, x])
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": OPSET}, name="Twice")
    return ir.Function(OWN, "Twice", graph=graph, attributes=[])


@st.composite
def models(draw: Draw, *, foreign: bool = False) -> ir.Model:
    """Draw a model of one to three float inputs [2, 3] and one to three outputs, which nodes may read."""
    count = draw(st.integers(1, 3))
    inputs = [ir.val(f"x{i}", ir.DataType.FLOAT, SHAPE) for i in range(count)]  # type: ignore[call-overload]
    scope = Scope(draw, list(inputs), foreign)
    outputs = [grow(scope, 6)]
    computed = [value for value in scope.values if value.producer() is not None]
    if draw(st.booleans()):
        outputs.append(scope.pick(computed))
    if draw(st.booleans()):
        outputs.append(scope.op("Identity", scope.any()))
    for index, value in enumerate(outputs):
        _typed(value, ir.DataType.FLOAT, SHAPE).name = f"y{index}"
    imports = {"": OPSET, OWN: 1} | ({FOREIGN: 7} if foreign else {})
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=scope.nodes,
        initializers=scope.initializers,
        opset_imports=imports,
        name="random",
    )
    return ir.Model(graph, ir_version=10, functions=[_twice()])
