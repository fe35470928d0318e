"""A repository with tensor models beside a language model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import ml_dtypes
import numpy as np
import onnx_ir as ir
from grpc_serving import INFO

from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.session import InferenceSession
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel
from carryall.runtime.service.core.tensor_model import TensorModel


def echo_model(*types: ir.DataType) -> InferenceSession:
    """A model whose outputs OUTPUT0, OUTPUT1 ... are its inputs, each of [batch, 2]."""
    inputs = [ir.val(f"INPUT{i}", kind, ["batch", 2]) for i, kind in enumerate(types)]
    nodes = [ir.node("Identity", [one]) for one in inputs]
    for i, node in enumerate(nodes):
        node.outputs[0].name, node.outputs[0].type = f"OUTPUT{i}", inputs[i].type
        node.outputs[0].shape = ir.Shape(["batch", 2])
    graph = ir.Graph(inputs, [node.outputs[0] for node in nodes], nodes=nodes, opset_imports={"": 21})
    return InferenceSession(ir.Model(graph, ir_version=10), providers=["cpu"])


def sum_model() -> InferenceSession:
    """SUM = A + B, float32 [batch, 4]."""
    a, b = (ir.val(name, ir.DataType.FLOAT, ["batch", 4]) for name in "AB")
    node = ir.node("Add", [a, b])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "SUM", a.type, a.shape
    graph = ir.Graph([a, b], node.outputs, nodes=[node], opset_imports={"": 21})
    return InferenceSession(ir.Model(graph, ir_version=10), providers=["cpu"])


def mixed_repository(llm: AsyncLLM, sessions: Mapping[str, InferenceSession]) -> ModelRepository:
    """A language model `toy`, which is the default, and tensor models."""
    tensors = {name: ModelLoader(partial(TensorModel, one), kind="tensor") for name, one in sessions.items()}
    return ModelRepository({"toy": lambda: ServedModel(llm, INFO), **tensors})


SAMPLES = {
    "BOOL": np.array([[True, False]]),
    "UINT8": np.array([[0, 255]], np.uint8),
    "UINT16": np.array([[0, 65535]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 127]], np.int8),
    "INT16": np.array([[-(2**15), 2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "FP16": np.array([[0.5, -65504]], np.float16),
    "FP32": np.array([[0.1, -3e38]], np.float32),
    "FP64": np.array([[0.1, -1e300]], np.float64),
    "BF16": np.array([[0.5, -3e38]], ml_dtypes.bfloat16),
    "BYTES": np.array([[b"", "\u00e4\u6f22".encode()]], object),
}
