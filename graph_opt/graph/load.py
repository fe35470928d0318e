"""Load ONNX files and check that passes can work on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from ...errors import GraphError
from .checker import silent_onnx_ir
from .edit import subgraphs
from .half_scales import widen_scales
from .map_types import has_maps, load_with_maps
from .onnx_files import read_onnx
from .opset_forms import invalid
from .stored_weights import check_stays_inside, check_stored
from .texts import check_texts

_SMALL = 1000  # bytes; onnx_ir infers shapes with tensors of up to this size


def load_model(path: Path) -> ir.Model:
    """Load and check an ONNX file for editing; external weights are mapped from disk on demand.

    Raises:
        GraphError: the file cannot be read, or is not a valid graph; see ``check_model``.
    """
    model = read_model(path)
    check_loaded(model, path)
    _hold_small_integers(model)
    return model


def _hold_small_integers(model: ir.Model) -> None:
    """Read small external integers: shape inference looks into them, and fails where they are in a file."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor) or tensor.nbytes > _SMALL:
                continue
            if tensor.dtype in (ir.DataType.INT32, ir.DataType.INT64):
                value.const_value = ir.tensor(np.array(tensor.numpy()), name=value.name)


def check_loaded(model: ir.Model, path: Path) -> None:
    """Check a model that was read from ``path`` as ``load_model`` does.

    Raises:
        GraphError: it is not a valid graph, or stores weights outside of its folder.
    """
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        if isinstance(value.const_value, ir.ExternalTensor):
            check_stays_inside(value.const_value, str(path))
    check_model(model, str(path))


def read_model(path: Path) -> ir.Model:
    """Read an ONNX file without checking it, to inspect it: runtimes also accept some invalid graphs.

    Raises:
        GraphError: the file does not exist, or cannot be read.
    """
    if not path.is_file():
        raise GraphError(f"{path} does not exist or is not a file")
    if not path.stat().st_size:
        raise GraphError(f"{path} is an empty file")
    try:
        with silent_onnx_ir():
            try:
                model = read_onnx(path)
            except Exception:
                if not has_maps(path):
                    raise
                model = load_with_maps(path)
        widen_scales(model)
        return model
    except Exception as error:  # protobuf and onnx_ir raise errors of many types for other files
        raise GraphError(f"{path} cannot be read as ONNX: {_root(error)}") from error


def check_model(model: ir.Model, name: str) -> None:
    """Check the assumptions of all passes, and sort nodes topologically.

    Operators of other domains are not checked.

    Args:
        model: the model. Its external weights must exist; they are not read.
        name: the model's name in messages.

    Raises:
        GraphError: the graph has no outputs, an unknown opset, an invalid node, a value without a producer, a
            cycle, or weights whose data is missing.
    """
    if not model.graph.outputs:
        raise GraphError(f"{name} has no graph, or its graph has no outputs")
    check_texts(model, name)
    _check_nodes(model, name)
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        _check_values(graph, name)
    for graph in model.graphs():
        _check_names(graph, name)
        for value in graph.initializers.values():
            if value.const_value is not None:
                check_stored(value.const_value, name)


def _check_names(graph: ir.Graph, name: str) -> None:
    names = [value.name for value in graph.inputs]
    duplicate = next((found for found in names if names.count(found) > 1), None)
    if duplicate is not None:
        raise GraphError(f"{name} has two inputs named {duplicate}")


def _check_nodes(model: ir.Model, name: str) -> None:
    newest = onnx.defs.onnx_opset_version()
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        stated = {**model.opset_imports, **body.opset_imports}
        stated |= {"": stated["ai.onnx"]} if "ai.onnx" in stated else {}
        version = stated.get("")
        if version is not None and version > newest:
            raise GraphError(
                f"{name} has opset {version}; the installed onnx {onnx.__version__} supports opsets up to "
                f"{newest}. Update onnx, or export the model again with opset {newest}"
            )
        for node in body.all_nodes():
            if node.domain not in stated:
                domain = node.domain or "ai.onnx"
                raise GraphError(
                    f"{name} uses {_describe(node)} of domain {domain}, but imports no opset of that domain"
                )
            reason = invalid(node, stated[node.domain])
            if reason is not None:
                raise GraphError(f"{name}: {_describe(node)} is not valid: {reason}")


def _check_values(graph: ir.Graph, name: str) -> None:
    """Check that every value that is read has a producer, and sort the nodes topologically."""
    if not _in_order(graph, frozenset(), set(), name):
        try:
            graph.sort()
        except ValueError as error:
            raise GraphError(f"{name} has a cycle: a node depends on its own result") from error


def _in_order(graph: ir.Graph, outer: frozenset[ir.Graph], computed: set[ir.Value], name: str) -> bool:
    """Check a graph and its subgraphs.

    Args:
        graph: the graph.
        outer: the graphs around it, whose values it may read.
        computed: the values that earlier nodes have produced; updated.
        name: the model's name in messages.

    Returns:
        Whether the nodes are in topological order.
    """
    inside, in_order = outer | {graph}, True
    for node in graph:
        for value in node.inputs:
            if value is not None:
                in_order &= value.producer() is None or value in computed
                if value.graph not in inside:
                    raise GraphError(
                        f"{name}: {_describe(node)} reads {value.name}, which no node, input or initializer "
                        "defines"
                    )
        for subgraph in subgraphs(node):
            in_order &= _in_order(subgraph, inside, computed, name)
        computed.update(node.outputs)
    for value in graph.outputs:
        is_given = value.is_graph_input() or value.is_initializer() or value.producer() is not None
        if value.graph is not graph or not is_given:
            raise GraphError(f"{name}: no node of the graph computes the output {value.name}")
    return in_order


def _describe(node: ir.Node) -> str:
    return f"{node.op_type} {node.name}" if node.name else node.op_type


def _root(error: BaseException) -> str:
    """Return the message of the innermost cause; onnx_ir wraps an error once per nesting level."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, TypeError) and error.__context__ is not None:
        error = error.__context__  # onnx_ir 1.1 raises a TypeError while it formats the message
    return f"{type(error).__name__}: {error}" if not str(error) else str(error)
