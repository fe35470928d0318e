"""Write a model to disk; the writing threads evaluate lazy initializers one at a time."""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir

from ..graph_opt.graph.saving import save_checked
from ..progress import Progress
from ..storage.writing import writing

_INLINE_BYTES = 256  # tensors up to this size are stored in the ONNX file itself
_MAX_IN_FLIGHT_BYTES = 256 << 20
_ALIGNMENT = 4096  # of large tensors, so that runtimes can map them


def save_model(model: ir.Model, path: Path, progress: Progress | None = None) -> None:
    """Write ``model`` to ``path`` and its weights to ``path`` + ``.data``.

    Raises:
        OSError: a file cannot be written.
    """
    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    total = sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.nbytes > _INLINE_BYTES)
    done = 0

    def count(tensor: ir.TensorProtocol, _info: ir.external_data.CallbackInfo) -> None:
        nonlocal done
        done += tensor.nbytes
        if progress is not None:
            progress(done, total, tensor.name or "")

    with writing(path.with_name(f"{path.name}.data")):
        save_checked(
            model,
            path,
            external_data=f"{path.name}.data",
            size_threshold_bytes=_INLINE_BYTES,
            callback=count,
            max_workers=os.cpu_count() or 1,
            max_in_flight_bytes=_MAX_IN_FLIGHT_BYTES,
            alignment=_ALIGNMENT,
        )
