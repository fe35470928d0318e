"""Whether weights are stored as a graph says, found out without reading them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ...errors import GraphError
from ...storage.paths import stays_inside
from .lazy import shape_of


def check_stored(tensor: ir.TensorProtocol, name: str) -> None:
    """Insist on as many bytes as type and shape say.

    Args:
        tensor: of a file, in it or beside it.
        name: what messages call the model.

    Raises:
        GraphError: there are fewer, or the shape is none.
    """
    if any(size < 0 for size in shape_of(tensor)):
        raise GraphError(f"{name} has a weight {tensor.name} of shape {list(shape_of(tensor))}")
    if isinstance(tensor, ir.ExternalTensor):
        _check_external(tensor, name)
    elif isinstance(tensor, ir.TensorProtoTensor) and tensor.dtype != ir.DataType.STRING:
        found = len(tensor.raw.raw_data)
        if tensor.raw.HasField("raw_data") and found != tensor.nbytes:
            raise GraphError(
                f"{name} is damaged: its weight {tensor.name} has {found} bytes, and {tensor.dtype} of shape "
                f"{list(shape_of(tensor))} takes {tensor.nbytes}"
            )


def _check_external(tensor: ir.ExternalTensor, name: str) -> None:
    path = Path(tensor.path)
    if not path.is_file():
        raise GraphError(f"{name} keeps the weight {tensor.name} in {path}, and there is no such file")
    if tensor.length is not None and tensor.length < tensor.nbytes:
        raise GraphError(
            f"{name} says that the weight {tensor.name} has {tensor.length} bytes in {path}, and "
            f"{tensor.dtype} of shape {list(shape_of(tensor))} takes {tensor.nbytes}"
        )
    end = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
    size = path.stat().st_size
    if size < end:
        raise GraphError(
            f"{path} is cut off: {name} expects {tensor.name} up to byte {end}, and it has {size}"
        )


def check_stays_inside(tensor: ir.ExternalTensor, name: str) -> None:
    """Insist that a file read from disk keeps its weights in its own folder, as ONNX does.

    Links are followed: that is how the hub's cache is laid out.

    Raises:
        GraphError: the weight is elsewhere, so that a model of a stranger could hand out any file.
    """
    if not stays_inside(str(tensor.location)):
        raise GraphError(
            f"{name} keeps the weight {tensor.name} in {tensor.location}, outside of its own folder; "
            "move that file beside the model, and save the model again"
        )
