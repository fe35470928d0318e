"""Arrange a package as transformers.js expects it: ``onnx/model_q4.onnx`` and keys of config.json.

Source of file names, keys and the name of the batch axis: transformers.js 4.3, src/utils/dtypes.js,
src/utils/model-loader.js and src/models/modeling_utils.js.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from ...storage.writing import writing
from ..config import CONFIG_FILE
from ..package import DATA_FILE, MODEL_FILE
from ..package_record import RECORD_FILE

# transformers.js names files and options by the storage of the weights, the first of these in the graph.
_TYPES = (
    ({onnx.TensorProto.INT4, onnx.TensorProto.UINT4}, ("q4", "_q4")),
    ({onnx.TensorProto.INT8, onnx.TensorProto.UINT8}, ("q8", "_quantized")),
    ({onnx.TensorProto.FLOAT16}, ("fp16", "_fp16")),
)
_FLOAT = ("fp32", "")
_BATCH, _THEIR_BATCH = "batch", "batch_size"


def arrange(package: Path, folder: Path) -> Path:
    """Move the files of a package into ``folder`` in the layout of transformers.js; return the model's file.

    Args:
        package: a package, which is empty afterwards.
        folder: an existing folder.

    Raises:
        OSError: a file cannot be written.
    """
    model = onnx.load(package / MODEL_FILE, load_external_data=False)
    dtype, suffix = _storage(model.graph)
    name = f"model{suffix}.onnx"
    (folder / "onnx").mkdir()
    for tensor in _tensors(model.graph):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = f"{name}_data"
    _name_batch_axis(model.graph)
    with writing(folder / "onnx" / name):
        onnx.save_model(model, folder / "onnx" / name)
    (package / MODEL_FILE).unlink()
    (package / RECORD_FILE).unlink()
    (package / DATA_FILE).rename(folder / "onnx" / f"{name}_data")
    for path in list(package.iterdir()):
        path.rename(folder / path.name)
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    config["transformers.js_config"] = _settings(dtype, name)
    with writing(folder / CONFIG_FILE):
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder / "onnx" / name


def _storage(graph: onnx.GraphProto) -> tuple[str, str]:
    """Return the name of the storage of the weights, and the suffix of the file."""
    found = {tensor.data_type for tensor in _tensors(graph) if tensor.external_data}
    return next((names for types, names in _TYPES if types & found), _FLOAT)


def _settings(dtype: str, name: str) -> dict[str, Any]:
    """Return defaults of ``from_pretrained``: the stored type, and one file of weights beside the graph."""
    return {"dtype": dtype, "use_external_data_format": {name: 1}}


def _name_batch_axis(graph: onnx.GraphProto) -> None:
    """Rename the axis ``batch``: empty caches get the batch size in axes called ``batch_size``, else 0."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == _BATCH:
                size.dim_param = _THEIR_BATCH


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)
