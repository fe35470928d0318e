"""Reads ONNX files, and says what is wrong with one that no pass could work on."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from ...errors import GraphError
from .checker import silent_onnx_ir
from .edit import subgraphs
from .map_types import has_maps, load_with_maps
from .opset_forms import invalid
from .stored_weights import check_stays_inside, check_stored


def load_model(path: Path) -> ir.Model:
    """Load an ONNX file to work on, its external weights mapped from disk on demand.

    Raises:
        GraphError: it cannot be read, or is not a valid graph; see ``check_model``.
    """
    model = read_model(path)
    check_loaded(model, path)
    return model


def check_loaded(model: ir.Model, path: Path) -> None:
    """Insist on what ``load_model`` promises of a model that was read from ``path``.

    Raises:
        GraphError: it is not a valid graph, or keeps weights outside of its folder.
    """
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        if isinstance(value.const_value, ir.ExternalTensor):
            check_stays_inside(value.const_value, str(path))
    check_model(model, str(path))


def read_model(path: Path) -> ir.Model:
    """Read an ONNX file to look at: what a runtime takes may be less than valid.

    Raises:
        GraphError: it is not there, or cannot be read.
    """
    if not path.is_file():
        raise GraphError(f"{path}: there is no such file")
    if not path.stat().st_size:
        raise GraphError(f"{path} is an empty file")
    try:
        with silent_onnx_ir():
            try:
                return ir.load(path)
            except Exception:
                if not has_maps(path):
                    raise
                return load_with_maps(path)
    except Exception as error:  # protobuf and onnx_ir raise many kinds for a file that is no ONNX
        raise GraphError(f"{path} is no readable ONNX file: {_root(error)}") from error


def check_model(model: ir.Model, name: str) -> None:
    """Insist on what every pass relies on; operators of other domains are nobody's business.

    Nodes that are out of order are put in order, since runtimes take such graphs too.

    Args:
        model: with external weights, which are looked for and not read.
        name: what messages call it.

    Raises:
        GraphError: no outputs, an unknown opset, a node that the standard forbids, a value from nowhere,
            a cycle, weights that are not there.
    """
    if not model.graph.outputs:
        raise GraphError(f"{name} holds no graph, or one without outputs")
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
    twice = next((found for found in names if names.count(found) > 1), None)
    if twice is not None:
        raise GraphError(f"{name} has two inputs of the name {twice}")


def _check_nodes(model: ir.Model, name: str) -> None:
    newest = onnx.defs.onnx_opset_version()
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        stated = {**model.opset_imports, **body.opset_imports}
        stated |= {"": stated["ai.onnx"]} if "ai.onnx" in stated else {}
        version = stated.get("")
        if version is not None and version > newest:
            raise GraphError(
                f"{name} is of opset {version}; the newest that the installed onnx {onnx.__version__} "
                f"knows is {newest}. Update onnx, or export the model again with opset {newest}"
            )
        for node in body.all_nodes():
            if isinstance(node.op_type, bytes) or isinstance(node.domain, bytes):
                raise GraphError(f"{name} is damaged: the name {node.op_type!r} of an operator is no text")
            if node.domain not in stated:
                domain = node.domain or "ai.onnx"
                raise GraphError(f"{name} uses {_of(node)} of domain {domain}, and states no opset for it")
            reason = invalid(node, stated[node.domain])
            if reason is not None:
                raise GraphError(f"{name}: {_of(node)} is not valid: {reason}")


def _check_values(graph: ir.Graph, name: str) -> None:
    """Check that something makes every value that is read, and put the nodes in order."""
    if not _in_order(graph, frozenset(), set(), name):
        try:
            graph.sort()
        except ValueError as error:
            raise GraphError(f"{name} has a cycle: nodes that depend on their own results") from error


def _in_order(graph: ir.Graph, outer: frozenset[ir.Graph], made: set[ir.Value], name: str) -> bool:
    """Check one graph and those inside it, which see the values of ``outer`` too.

    Args:
        graph: the graph.
        outer: the graphs around it.
        made: what nodes made so far; added to.
        name: what messages call the model.

    Returns:
        Whether every value is made before it is read.
    """
    inside, in_order = outer | {graph}, True
    for node in graph:
        for value in node.inputs:
            if value is not None:
                in_order &= value.producer() is None or value in made
                if value.graph not in inside:
                    raise GraphError(f"{name}: {_of(node)} reads {value.name}, and no node makes it")
        for subgraph in subgraphs(node):
            in_order &= _in_order(subgraph, inside, made, name)
        made.update(node.outputs)
    for value in graph.outputs:
        is_given = value.is_graph_input() or value.is_initializer() or value.producer() is not None
        if value.graph is not graph or not is_given:
            raise GraphError(f"{name} has the output {value.name}, and no node of its graph makes it")
    return in_order


def _of(node: ir.Node) -> str:
    return f"{node.op_type} {node.name}" if node.name else node.op_type


def _root(error: BaseException) -> str:
    """Return what the innermost of a chain of errors says; onnx_ir wraps once a level."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, TypeError) and error.__context__ is not None:
        error = error.__context__  # onnx_ir 1.1 fails while it says what was wrong
    return f"{type(error).__name__}: {error}" if not str(error) else str(error)
