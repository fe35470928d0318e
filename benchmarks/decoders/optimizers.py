"""The optimizers that ``league.py`` compares; each reads an ONNX file and writes the optimized one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass

CONTEXT = 512  # tokens: length of the rope tables of the CPU's graph


def original(source: Path, target: Path) -> None:
    """Save the graph unchanged."""
    ir.save(ir.load(source), target, external_data=f"{target.name}.data")


def onnxslim(source: Path, target: Path) -> None:
    """Run onnxslim."""
    import onnxslim as library  # type: ignore[import-not-found]

    onnx.save(library.slim(onnx.load(source)), target)


def onnxsim(source: Path, target: Path) -> None:
    """Run onnx-simplifier."""
    import onnxsim as library  # type: ignore[import-not-found]

    onnx.save(library.simplify(onnx.load(source))[0], target)


def onnxscript(source: Path, target: Path) -> None:
    """Run onnxscript's optimizer."""
    from onnxscript import optimizer

    model = ir.load(source)
    optimizer.optimize(model)
    ir.save(model, target, external_data=f"{target.name}.data")


def ort_fusions(source: Path, target: Path) -> None:
    """Run onnxscript's optimizer and its fusions for onnxruntime."""
    from onnxscript import optimizer
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model = ir.load(source)
    optimizer.optimize(model)
    ir.save(optimize_for_ort(model)[0], target, external_data=f"{target.name}.data")


def ort_transformers(source: Path, target: Path) -> None:
    """Run onnxruntime.transformers."""
    from onnxruntime.transformers import optimizer

    made = optimizer.optimize_model(str(source), model_type="gpt2", opt_level=1)
    made.save_model_to_file(str(target))


def ort_all(source: Path, target: Path) -> None:
    """Save what onnxruntime optimizes at loading, at its highest level."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(target)
    weights = "session.optimized_model_external_initializers_file_name"
    options.add_session_config_entry(weights, f"{target.name}.data")
    ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def carryall_portable(source: Path, target: Path) -> None:
    """Run carryall's portable passes."""
    from carryall.graph_opt.pipeline.pipeline import run
    from carryall.graph_opt.pipeline.pipelines import portable_passes

    ir.save(run(ir.load(source), portable_passes())[0], target, external_data=f"{target.name}.data")


def carryall_cpu(source: Path, target: Path, context: int = CONTEXT) -> None:
    """Run carryall's portable passes, then the CPU passes for a context of ``context`` tokens."""
    from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
    from carryall.graph_opt.pipeline.pipeline import run
    from carryall.graph_opt.pipeline.pipelines import portable_passes

    passes = [*portable_passes(), *slot_passes(SlotOptions(context_length=context))]
    ir.save(run(ir.load(source), passes)[0], target, external_data=f"{target.name}.data")


# name -> (required package, function)
OPTIMIZERS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "original": ("onnx_ir", original),
    "onnxslim": ("onnxslim", onnxslim),
    "onnxsim": ("onnxsim", onnxsim),
    "onnxscript": ("onnxscript", onnxscript),
    "ort_fusions": ("onnxscript", ort_fusions),
    "ort_transformers": ("onnxruntime", ort_transformers),
    "ort_all": ("onnxruntime", ort_all),
    "carryall": ("carryall", carryall_portable),
    "carryall_cpu": ("carryall", carryall_cpu),
}


def keep_products(source: Path, target: Path) -> None:
    """Write a graph of only the products with stored weights; each product's input is the token id."""
    model = ir.load(source)
    graph = model.graph
    made = [ir.node("Cast", [graph.inputs[0]], attributes={"to": ir.DataType.FLOAT})]
    products = []
    for node in [node for node in graph if node.op_type in ("MatMul", "Gemm", "MatMulNBits")]:
        weight = node.inputs[1]
        if weight is None or not weight.is_initializer() or weight.shape is None:
            continue
        stored = weight.shape.numpy()[node.attributes.get_int("transB", 0)]
        shape = [1, node.attributes.get_int("K", stored)]
        made.append(ir.node("Constant", [], attributes={"value_ints": shape}))
        made.append(ir.node("Expand", [made[0].outputs[0], made[-1].outputs[0]]))
        node.replace_input_with(0, made[-1].outputs[0])
        products.append(node.outputs[0])
    graph.insert_before(graph[0], made)
    graph.outputs[:] = products
    RemoveUnusedNodesPass()(model)
    ir.save(model, target, external_data=f"{target.name}.data")
