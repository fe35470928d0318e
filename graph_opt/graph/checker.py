"""Run ONNX's checker on a graph in memory, without its large weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
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
    """Load small external weights, and put zeros in place of computed ones.

    The checker would look for files in the working directory. It reads no elements, and to quantize every
    weight for each call would take most of the time of checking after each pass.
    """
    hidden: list[tuple[ir.Value, ir.TensorProtocol]] = []
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            checked = graph is not model.graph or (tensor is not None and tensor.nbytes <= _DROPPED_BYTES)
            if checked and isinstance(tensor, ir.ExternalTensor | ir.LazyTensor):
                hidden.append((value, tensor))
                shown = tensor.numpy() if isinstance(tensor, ir.ExternalTensor) else _zeros(tensor)
                value.const_value = ir.tensor(shown, dtype=tensor.dtype, name=value.name)
    try:
        yield
    finally:
        for value, tensor in hidden:
            value.const_value = tensor


def _zeros(tensor: ir.TensorProtocol) -> npt.NDArray[Any]:
    return np.zeros(tensor.shape.numpy(), tensor.dtype.numpy())
