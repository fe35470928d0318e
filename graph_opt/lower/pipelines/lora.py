"""Add a low-rank branch to linear layers, for LoRA adapters that are chosen by each row of the batch.

    y = MatMul(x, W) (+ bias)   ->   y + MatMul(Where(lora_mask, MatMul(x, Transpose(down)), 0), up)

``down`` [columns, in] and ``up`` [columns, out] are inputs: the matrices A and scale * B^T of the resident
adapters, one below the other. ``lora_mask`` [batch, 1, columns] keeps the columns of a row's own adapter.
The others become exact zeros, so an adapter does not change the result of a row that does not use it.
E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from ....contract import LOGITS, LORA_MASK, lora_down_name, lora_up_name
from ....errors import UsageError
from ....records import dataclass
from ...graph.edit import constant, int_attribute, nodes_of, shared_constant, sole_consumer, weight
from ...graph.lazy import shape_of
from ...passes.base import GraphPass
from ...passes.shape_inference import ShapeInferencePass
from ...quantize.algorithms.layer_changes import module_of
from ..outputs.logits import find_head

_COLUMNS = "lora_columns"  # the axis of the ranks of all bound adapters
_RANK = 3  # [batch, sequence, features]


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A linear layer: its module's name, the value that enters it, and the value that leaves it."""

    module: str
    x: ir.Value
    output: ir.Value
    inputs: int
    outputs: int


class LoraPass(GraphPass):
    """Add a low-rank branch in fp32 to every linear layer, except the head. Runs before a lowering.

    Args:
        modules: last parts of the modules' names, such as ``q_proj``; empty for all.

    Raises:
        UsageError: the graph has no linear layer of one of these names.
    """

    def __init__(self, modules: Collection[str] = ()) -> None:
        super().__init__()
        self.modules = tuple(modules)
        self.name = " ".join(["Lora", *self.modules])

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph, with known shapes."""
        ShapeInferencePass()(model)
        return super().call(model)

    def rewrite(self, graph: ir.Graph) -> None:
        """Add the branches and their inputs."""
        layers = [one for one in linears(graph) if not self.modules or _is_one_of(one.module, self.modules)]
        missing = [name for name in self.modules if not any(_is_one_of(one.module, [name]) for one in layers)]
        if missing or not layers:
            named = sorted({one.module.rpartition(".")[2] for one in linears(graph)})
            wanted = f"linear layer {missing[0]}" if missing else "linear layer"
            raise UsageError(
                f"the graph has no {wanted} that a LoRA adapter can change; it has: "
                f"{', '.join(named) or 'none with the name of a module'}"
            )
        mask = ir.val(LORA_MASK, ir.DataType.BOOL, ["batch", 1, _COLUMNS])
        graph.inputs.append(mask)
        zero = shared_constant(graph, "lora.zero", np.array(0, np.float32))
        for linear in layers:
            _add_branch(graph, linear, mask, zero)
            self.fired += 1


def linears(graph: ir.Graph) -> Iterator[AdapterTarget]:
    """Yield the linear layers on [batch, sequence, features] whose weights have a module's name.

    Products of experts are none: their rows are tokens of any sequence.
    """
    logits = next((value for value in graph.outputs if value.name == LOGITS), None)
    head = find_head(logits)[1] if logits is not None else []
    for op_type in ("MatMul", "MatMulInteger"):
        for node in nodes_of(graph, op_type):
            found = None if node in head else _linear(node)
            if found is not None:
                yield found


def _linear(node: ir.Node) -> AdapterTarget | None:
    tensor = _stored(node.inputs[1])
    module = None if tensor is None else module_of(str(tensor.name))
    x, output = _input(node), _output(node)
    if tensor is None or module is None or x is None or output is None:
        return None
    if x.shape is None or len(x.shape) != _RANK or len(shape_of(tensor)) != 2:
        return None
    inputs, outputs = shape_of(tensor)
    return AdapterTarget(module, x, output, inputs, outputs)


def _stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the stored matrix of a weight, which may be quantized, with or without minima of its blocks."""
    while value is not None and (tensor := weight(value)) is None:
        node = value.producer()
        if node is None or node.op_type not in ("Add", "Cast", "DequantizeLinear", "Reshape"):
            return None
        value = node.inputs[0]
    return None if value is None else tensor


def _input(node: ir.Node) -> ir.Value | None:
    """Return the float value that enters a product, before its quantization and reordering."""
    x = node.inputs[0]
    for op_types in (("DequantizeLinear",), ("QuantizeLinear", "DynamicQuantizeLinear")):
        producer = None if x is None else x.producer()
        x = producer.inputs[0] if producer is not None and producer.op_type in op_types else x
    gather = None if x is None else x.producer()
    if gather is not None and gather.op_type == "Gather" and int_attribute(gather, "axis", 0) == -1:
        order = constant(gather.inputs[1])  # activations in the order of a GPTQ weight
        x = gather.inputs[0] if order is not None and order.ndim == 1 else x
    return x


def _output(node: ir.Node) -> ir.Value | None:
    """Return the float result of a product with its bias; None if an integer product is not scaled."""
    output = node.outputs[0]
    if node.op_type == "MatMulInteger":
        cast = sole_consumer(output)
        scaled = sole_consumer(cast.outputs[0]) if cast is not None and cast.op_type == "Cast" else None
        if scaled is None or scaled.op_type != "Mul":
            return None
        output = scaled.outputs[0]
    added = sole_consumer(output)
    if added is None or added.op_type != "Add":
        return output
    bias = next((weight(value) for value in added.inputs if value is not output), None)
    return added.outputs[0] if bias is not None and len(shape_of(bias)) == 1 else output


def _add_branch(graph: ir.Graph, linear: AdapterTarget, mask: ir.Value, zero: ir.Value) -> None:
    down = ir.val(lora_down_name(linear.module), ir.DataType.FLOAT, [_COLUMNS, linear.inputs])
    up = ir.val(lora_up_name(linear.module), ir.DataType.FLOAT, [_COLUMNS, linear.outputs])
    graph.inputs.extend([down, up])
    last = linear.output.producer()
    assert last is not None  # noqa: S101 -- it is the output of a product
    uses = list(linear.output.uses())
    nodes: list[ir.Node] = []

    def op(op_type: str, *operands: ir.Value, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(op_type, operands, attributes))
        return nodes[-1].outputs[0]

    def cast(value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return op("Cast", value, to=int(dtype))

    x, dtype = linear.x, linear.output.dtype
    x = x if x.dtype in (None, ir.DataType.FLOAT) else cast(x, ir.DataType.FLOAT)
    low = op("MatMul", x, op("Transpose", down, perm=[1, 0]))
    change = op("MatMul", op("Where", mask, low, zero), up)
    if dtype is not None and dtype != ir.DataType.FLOAT:
        change = cast(change, dtype)
    both = op("Add", linear.output, change)
    graph.insert_after(last, nodes)
    both.type, both.shape = linear.output.type, linear.output.shape
    for use in uses:
        use.node.replace_input_with(use.idx, both)


def _is_one_of(module: str, names: Collection[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)
