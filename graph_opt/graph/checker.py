"""Run ONNX's checker on a graph in memory, without its large weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

_DROPPED_BYTES = 1000  # onnx_ir removes larger weights of the main graph before it calls the checker


def complaint(model: ir.Model) -> str | None:
    """Return the error of ONNX's checker, None if the model is valid.

    Operators of other domains than ONNX's are not checked.
    """
    with silent_onnx_ir(), _small_weights_in_memory(model):
        try:
            common.CheckerPass()(model)
        except (onnx.checker.ValidationError, RuntimeError, TypeError, ValueError) as error:
            return str(error)
    return None


@contextmanager
def silent_onnx_ir() -> Iterator[None]:
    """Silence onnx_ir's log: its warnings repeat the errors that are checked here."""
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _small_weights_in_memory(model: ir.Model) -> Iterator[None]:
    """Load small external weights: the checker would look for their files in the working directory."""
    hidden: list[tuple[ir.Value, ir.TensorProtocol]] = []
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            checked = graph is not model.graph or (tensor is not None and tensor.nbytes <= _DROPPED_BYTES)
            if isinstance(tensor, ir.ExternalTensor) and checked:
                hidden.append((value, tensor))
                value.const_value = ir.tensor(tensor.numpy(), name=value.name)
    try:
        yield
    finally:
        for value, tensor in hidden:
            value.const_value = tensor
