"""A graph whose names or comments are not UTF-8 is refused: it could be read, but not written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from carryall.errors import GraphError
from carryall.graph_opt.graph.load import load_model

WORD = "commented"


def entry(part: Any, key: str, value: str) -> None:
    added = part.metadata_props.add()
    added.key, added.value = key, value


PLACES: dict[str, Callable[[Any], Any]] = {
    "producer_name": lambda model: setattr(model, "producer_name", WORD),
    "producer_version": lambda model: setattr(model, "producer_version", WORD),
    "domain": lambda model: setattr(model, "domain", WORD),
    "metadata": lambda model: entry(model, WORD, "x"),
    "name": lambda model: setattr(model.graph, "name", WORD),
    "doc_string": lambda model: setattr(model.graph.input[0], "doc_string", WORD),
    "denotation": lambda model: setattr(model.graph.input[0].type, "denotation", WORD),
    "op_type": lambda model: setattr(model.graph.node[0], "op_type", WORD),
    "overload": lambda model: setattr(model.graph.node[0], "overload", WORD),
}


@pytest.mark.parametrize("field", PLACES)
def test_bytes_that_are_not_text_are_refused(field: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> net (float[3] x) => (float[3] y) { y = Abs(x) }'
    )
    PLACES[field](model)
    content = model.SerializeToString().replace(WORD.encode(), b"\xff" + WORD.encode()[1:])
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(GraphError, match=rf"net.onnx is damaged: the {field} b'\\xff\w+' is not text"):
        load_model(tmp_path / "net.onnx")


def test_an_entry_of_a_node_is_checked_too(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> net (float[3] x) => (float[3] y) { y = Abs(x) }'
    )
    entry(model.graph.node[0], "x", WORD)
    content = model.SerializeToString().replace(WORD.encode(), b"\xff" + WORD.encode()[1:])
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(GraphError, match="the metadata"):
        load_model(tmp_path / "net.onnx")
