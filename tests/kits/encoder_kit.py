"""Encoders in the layout of sentence-transformers, without weights of a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from text_kit import write_byte_level

from carryall.runtime.text.tokenizer import Tokenizer

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((258, 6)).astype(np.float32)


def write_encoder(folder: Path, mode: str | None = "mean", *, normalize: bool = False, **config: Any) -> Path:
    """An encoder whose hidden states are rows of TABLE by token; padding has states too, to be skipped."""
    write_byte_level(folder)
    inputs = [ir.val(name, ir.DataType.INT64, ["n", "t"]) for name in ("input_ids", "attention_mask")]
    table = ir.val("table", const_value=ir.tensor(TABLE, name="table"))
    node = ir.node("Gather", [table, inputs[0]])
    node.outputs[0].name, node.outputs[0].type = "token_embeddings", ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape(["n", "t", 6])
    graph = ir.Graph(inputs, node.outputs, nodes=[node], initializers=[table], opset_imports={"": 21})
    (folder / "onnx").mkdir()
    ir.save(ir.Model(graph, ir_version=10), folder / "onnx/model.onnx")
    kinds = ["Transformer", *(["Pooling"] if mode else []), *(["Normalize"] if normalize else [])]
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": paths[kind]} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    if mode:
        (folder / "1_Pooling").mkdir()
        names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
        modes = {f"pooling_mode_{name}": key == mode for key, name in names.items()}
        (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 6, **modes}))
    if config:
        (folder / "sentence_bert_config.json").write_text(json.dumps(config))
    return folder


def states(folder: Path, text: str, most: int | None = None) -> Any:
    return TABLE[Tokenizer(folder).encode(text)[:most]]
