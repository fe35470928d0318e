"""Folders of models."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from carryall import EngineConfig, ModelConfig
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.model_folder import models_in


def write_sum(path: Path, times: int = 1) -> None:
    """SUM = A + A + ..., float32 [2]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    value = ir.val("A", ir.DataType.FLOAT, [2])
    nodes = []
    total = value
    for _ in range(times):
        nodes.append(ir.node("Add", [total, value]))
        total = nodes[-1].outputs[0]
        total.type, total.shape = value.type, value.shape
    total.name = "SUM"
    graph = ir.Graph([value], [total], nodes=nodes, opset_imports={"": 21})
    ir.save(ir.Model(graph, ir_version=10), path)


def scan(folder: Path) -> dict[str, list[ModelLoader]]:
    """The models of a folder."""
    return models_in(folder, ModelConfig(model="unused"), EngineConfig(max_slots=2))
