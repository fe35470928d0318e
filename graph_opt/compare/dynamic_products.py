"""Products of integers whose scales follow the inputs: graphs of dynamic quantization without their rounding.

``DynamicQuantizeLinear`` rounds each input to 8 bits. A rewrite that changes an input by one unit in the
last place moves some of its elements to the next integer, which later layers amplify: the results of a right
rewrite then differ as much as the rounding itself costs. Without the rounding both graphs must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from ...storage.scratch import scratch_folder
from ..graph.edit import insert
from ..graph.load import load_model
from ..graph.saving import save_model
from .report import VerifyReport

_DYNAMIC = "DynamicQuantizeLinear"
_PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}  # and the operators on floats
_OTHER_ZERO = 3  # index of the zero point of a product's second operand


def judge_dynamic_products(
    report: VerifyReport,
    files: tuple[Path, Path],
    compare: Callable[[Path, Path], VerifyReport],
) -> VerifyReport:
    """Allow what dynamic quantization alone costs where both graphs are equal without it.

    Args:
        report: a failed comparison of both files.
        files: the reference and the candidate.
        compare: compares two files.

    Returns:
        The report. It is unchanged if a graph rounds in another way too. Else it has the comparison without
        rounding as ``exact``, and, if that passed, outputs pass that differ by no more than the reference
        differs from itself without rounding.
    """
    with scratch_folder() as folder:
        exact = folder / "reference.onnx", folder / "candidate.onnx"
        if not all(_write_without_rounding(*pair) for pair in zip(files, exact, strict=True)):
            return report
        report = replace(report, exact=compare(*exact))
        if report.exact is None or not report.exact.passed:
            return report
        costs = compare(files[0], exact[0]).outputs
    outputs = {
        name: replace(outcome, reason=None, rounding=outcome.max_rel)
        if outcome.reason is not None and name in costs and outcome.max_abs <= costs[name].max_abs
        else outcome
        for name, outcome in report.outputs.items()
    }
    return replace(report, outputs=outputs)


def _write_without_rounding(model: Path, path: Path) -> bool:
    """Write a copy whose products multiply floats; False if its dynamic quantization has other readers."""
    copy = load_model(model)
    nodes = [node for node in copy.graph.all_nodes() if node.op_type == _DYNAMIC]
    if not nodes or not all(_use_floats(node) for node in nodes):
        return False
    save_model(copy, path)
    return True


def _use_floats(node: ir.Node) -> bool:
    """Let the products of a dynamically quantized input read the input over its scale, without rounding."""
    quantized, scale, zero = node.outputs
    x, graph = node.inputs[0], node.graph
    readers = [use.node for use in quantized.uses()]
    fits = all(
        reader.op_type in _PRODUCTS and reader.inputs[0] is quantized and reader.inputs[2] is zero
        for reader in readers
    )
    if x is None or not fits or graph is None or {use.node for use in zero.uses()} - set(readers):
        return False
    for reader in readers:
        levels = insert(reader, "Div", [x, scale]).outputs[0]
        weights = insert(reader, "Cast", [reader.inputs[1]], {"to": int(ir.DataType.FLOAT)}).outputs[0]
        shift = reader.inputs[_OTHER_ZERO] if len(reader.inputs) > _OTHER_ZERO else None
        if shift is not None:
            shift = insert(reader, "Cast", [shift], {"to": int(ir.DataType.FLOAT)}).outputs[0]
            weights = insert(reader, "Sub", [weights, shift]).outputs[0]
        reader.op_type = _PRODUCTS[reader.op_type]
        reader.resize_inputs(2)
        reader.replace_input_with(0, levels)
        reader.replace_input_with(1, weights)
        reader.outputs[0].dtype = ir.DataType.FLOAT
    return True
