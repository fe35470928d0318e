"""Check that the names and comments of a graph are text: protobuf reads other bytes too, but writes none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from ...errors import GraphError

_FIELDS = ("name", "op_type", "domain", "overload", "doc_string", "denotation")
_PRODUCER = ("producer_name", "producer_version")


def check_texts(model: ir.Model, name: str) -> None:
    """Check everything of a model that its file holds as text.

    Args:
        model: the model that was read.
        name: its name in messages.

    Raises:
        GraphError: a name, a comment or an entry of the metadata is not UTF-8.
    """
    for part in _parts(model):
        texts = [(field, getattr(part, field, None)) for field in (*_FIELDS, *_PRODUCER)]
        entries = getattr(part, "metadata_props", {})
        texts += [("metadata", text) for entry in entries.items() for text in entry]
        for field, text in texts:
            if isinstance(text, bytes):
                raise GraphError(f"{name} is damaged: the {field} {text[:60]!r} is not text")


def _parts(model: ir.Model) -> Iterator[Any]:
    yield model
    yield from model.functions.values()
    for graph in model.graphs():
        yield graph
        for value in (*graph.inputs, *graph.outputs):
            yield from (value, value.type)
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for node in (node for body in bodies for node in body.all_nodes()):
        yield node
        for value in node.outputs:
            yield from (value, value.type)
        yield from node.attributes.values()
