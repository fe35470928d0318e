"""Check that weights are stored as the graph states, without reading them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ...errors import GraphError
from ...storage.paths import stays_inside
from .lazy import shape_of


def check_stored(tensor: ir.TensorProtocol, name: str) -> None:
    """Check that a weight has as many bytes as its type and shape require.

    Args:
        tensor: a weight, inline or external.
        name: the model's name in messages.

    Raises:
        GraphError: bytes or the type are missing, or a size of the shape is negative.
    """
    if any(size < 0 for size in shape_of(tensor)):
        raise GraphError(
            f"{name} is damaged: weight {tensor.name} has the invalid shape {list(shape_of(tensor))}"
        )
    if tensor.dtype == ir.DataType.UNDEFINED:
        raise GraphError(f"{name} is damaged: weight {tensor.name} has no element type")
    if isinstance(tensor, ir.ExternalTensor):
        _check_external(tensor, name)
    elif isinstance(tensor, ir.TensorProtoTensor) and tensor.dtype != ir.DataType.STRING:
        found = len(tensor.raw.raw_data)
        if tensor.raw.HasField("raw_data") and found != tensor.nbytes:
            raise GraphError(
                f"{name} is damaged: weight {tensor.name} has {found} bytes; {tensor.dtype} of shape "
                f"{list(shape_of(tensor))} needs {tensor.nbytes}"
            )


def _check_external(tensor: ir.ExternalTensor, name: str) -> None:
    path = Path(tensor.path)
    if not path.is_file():
        raise GraphError(f"{name} stores weight {tensor.name} in {path}, which does not exist")
    if tensor.length is not None and tensor.length < tensor.nbytes:
        raise GraphError(
            f"{name} states that weight {tensor.name} has {tensor.length} bytes in {path}; "
            f"{tensor.dtype} of shape {list(shape_of(tensor))} needs {tensor.nbytes}"
        )
    end = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
    size = path.stat().st_size
    if size < end:
        raise GraphError(
            f"{path} is truncated: it has {size} bytes, and {name} stores {tensor.name} up to byte {end}"
        )


def check_stays_inside(tensor: ir.ExternalTensor, name: str) -> None:
    """Check that a weight is stored in the model's own folder, as ONNX requires.

    Otherwise an untrusted model could read any file. Only the file name is checked: links are allowed,
    because the hub's cache uses them.
    """
    if not stays_inside(str(tensor.location)):
        raise GraphError(
            f"{name} stores weight {tensor.name} in {tensor.location}, outside of its own folder; "
            "move that file beside the model and save the model again"
        )
