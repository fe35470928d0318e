"""ONNX's own checker on a graph in memory, whose weights it need not see."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

_DROPPED_BYTES = 1000  # onnx_ir shows the checker no larger weights, those of subgraphs excepted


def complaint(model: ir.Model) -> str | None:
    """Return what ONNX's checker finds wrong with a model, None if nothing.

    It knows no operators but ONNX's; those of other domains it passes over.
    """
    with silent_onnx_ir(), _small_weights_in_memory(model):
        try:
            common.CheckerPass()(model)
        except (onnx.checker.ValidationError, RuntimeError, TypeError, ValueError) as error:
            return str(error)
    return None


@contextmanager
def silent_onnx_ir() -> Iterator[None]:
    """Keep onnx_ir from logging about what is checked here anyway."""
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _small_weights_in_memory(model: ir.Model) -> Iterator[None]:
    """Hide where weights lie: the checker would look for their files in the working directory."""
    hidden: list[tuple[ir.Value, ir.TensorProtocol]] = []
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            seen = graph is not model.graph or (tensor is not None and tensor.nbytes <= _DROPPED_BYTES)
            if isinstance(tensor, ir.ExternalTensor) and seen:
                hidden.append((value, tensor))
                value.const_value = ir.tensor(tensor.numpy(), name=value.name)
    try:
        yield
    finally:
        for value, tensor in hidden:
            value.const_value = tensor
