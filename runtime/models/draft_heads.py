"""The head of a model that predicts further tokens, as a model that reads the other's hidden states."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...exporter.package import DRAFT_HEAD_FILE, fingerprint
from ...records import dataclass
from ...storage.cache import cache_key
from .model_source import CheckpointModel, SourceModel

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class HeadOfCheckpoint(CheckpointModel):
    """The head of a checkpoint folder, quantized as the model is, without a text.

    Args:
        head: the folder with the head's tensors, if they are not among the checkpoint's.
    """

    head: Path | None = field(kw_only=True, default=None)

    def build(self, *, stored: bool = False) -> ir.Model:
        """See ``InPlaceModel``.

        Raises:
            UsageError: there is no head.
        """
        from .building import draft_head_graph

        model = draft_head_graph(self.folder, self.config, self.method, self.head)
        if model is None:
            raise _no_head(self.name if self.head is None else str(self.head))
        return model

    def identity(self) -> str:
        other = "" if self.head is None else fingerprint(self.head)
        return cache_key(draft_head=super().identity(), other=other)


def draft_head_of(source: SourceModel, folder: Path | None = None) -> SourceModel:
    """Return the head of a model, which runs where the model does.

    Args:
        source: the model, a checkpoint or a package.
        folder: a folder with the head's tensors, if they are not the checkpoint's.

    Raises:
        UsageError: it has no head, or none that can be used.
    """
    check_not_rotated(source)
    if isinstance(source, CheckpointModel):
        return HeadOfCheckpoint(
            source.name, source.folder, source.model_path, method=source.method, head=folder
        )
    if folder is not None:
        raise UsageError(
            f"{source.name} is no checkpoint folder, so the head of {folder} cannot be joined to it"
        )
    if source.package is None or DRAFT_HEAD_FILE not in source.package.record.files:
        raise _no_head(source.name)
    return SourceModel(source.name, source.folder, source.folder / DRAFT_HEAD_FILE)


def check_not_rotated(source: SourceModel) -> None:
    """Refuse a model whose hidden states no head knows.

    Raises:
        UsageError: quantization has rotated them.
    """
    from ...graph_opt.quantize.algorithms.layer_changes import LayerChanges

    if LayerChanges.of(source.graph.graph).rotates_stream:
        raise UsageError(
            f"{source.name} was quantized with a rotation of its hidden states, which its draft head does "
            "not know; quantize it with --no-rotate, or choose prompt-lookup"
        )


def _no_head(name: str) -> UsageError:
    return UsageError(
        f"{name} has no head that predicts further tokens (mtp.* or the layers of num_nextn_predict_layers), "
        "or its family has none; choose prompt-lookup or draft:MODEL"
    )
