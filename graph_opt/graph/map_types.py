"""Load and save graphs with values of ONNX map types, which onnx_ir does not support.

Classifiers converted from scikit-learn return a sequence of maps. Passes do not use map types, so they are
removed on load and restored on save.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from .onnx_files import allow_links

_KEY = "carryall.map_types"  # in ir.Model.meta, which is not written


def load_with_maps(path: Path) -> ir.Model:
    """Load an ONNX file without its map types, which are kept in the model's ``meta``."""
    proto = onnx.load(path, load_external_data=False)
    kept: dict[str, onnx.TypeProto] = {}
    for value in _values(proto.graph):
        if _holds_map(value.type):
            kept[value.name] = onnx.TypeProto()
            kept[value.name].CopyFrom(value.type)
            value.ClearField("type")
    model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, os.path.dirname(path))
    allow_links(model)
    model.meta[_KEY] = kept
    return model


def has_maps(path: Path) -> bool:
    """Return whether a value of an ONNX file has a map type.

    Raises:
        Exception: the file is not ONNX; protobuf raises errors of several types.
    """
    return any(_holds_map(value.type) for value in _values(onnx.load(path, load_external_data=False).graph))


def map_names(model: ir.Model) -> list[str]:
    """Return the names of a loaded model's values that are maps, or sequences of maps."""
    return list(model.meta.get(_KEY, {}))


def restore_map_types(model: ir.Model, path: Path) -> None:
    """Write the map types kept in ``model.meta`` into ``path``, to which ``model`` has been saved."""
    kept: dict[str, onnx.TypeProto] = model.meta.get(_KEY, {})
    if not kept:
        return
    proto = onnx.load(path, load_external_data=False)
    for value in _values(proto.graph):
        if value.name in kept and value.type.WhichOneof("value") is None:
            value.type.CopyFrom(kept[value.name])
    onnx.save(proto, path)


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.input
    yield from graph.output
    yield from graph.value_info
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                yield from _values(inner)


def _holds_map(type_: onnx.TypeProto) -> bool:
    match type_.WhichOneof("value"):
        case "map_type":
            return True
        case "sequence_type":
            return _holds_map(type_.sequence_type.elem_type)
        case "optional_type":
            return _holds_map(type_.optional_type.elem_type)
        case _:
            return False
