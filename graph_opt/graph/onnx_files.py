"""Read ONNX files whose weights may be links."""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir

from ...errors import GraphError
from ...storage.paths import link_stays_inside


class StoredWeight(ir.ExternalTensor):
    """A weight in a file beside the model.

    onnx_ir refuses files with several hard links, which deduplicating stores make, and links into the hub's
    cache.
    """

    __slots__ = ()

    def _check_path_containment(self) -> None:
        """Replace onnx_ir's check; called before each access to the file.

        Raises:
            GraphError: the file is a link to a place outside of the model's folder.
        """
        path = Path(self.path)
        if not link_stays_inside(path, Path(self.base_dir)):
            raise GraphError(
                f"{path} is a link to {path.resolve()}, outside of the model's folder; replace it by a copy"
            )


def read_onnx(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX file; external weights are mapped from disk on demand.

    Raises:
        Exception: the file is not ONNX; protobuf and onnx_ir raise errors of many types.
    """
    model = ir.load(path)
    allow_links(model)
    return model


def allow_links(model: ir.Model) -> None:
    """Make every external weight of a model that was just read a ``StoredWeight``."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if type(value.const_value) is ir.ExternalTensor:
                value.const_value = _linked(value.const_value)


def _linked(tensor: ir.ExternalTensor) -> StoredWeight:
    return StoredWeight(
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
        base_dir=tensor.base_dir,
    )
