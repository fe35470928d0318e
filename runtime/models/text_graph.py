"""The graph of a text encoder without padding, in the cache if it was lowered before."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ...contract import CONTEXT_LENGTH, PRODUCER
from ...errors import UnsupportedAttentionError
from ...exporter.package import MODEL_FILE
from ...providers.base import Provider
from ...records import dataclass
from ...storage.cache import cache_key, cached_folder, intact_folder
from ...storage.hashes import content_key
from ...storage.writing import writing
from ..process.garbage import collector_paused

_REASON = "padded.json"  # why a graph keeps its form


@dataclass(frozen=True, slots=True)
class Unlowered:
    """Why a graph keeps its form, and whether another exporter wrote it."""

    reason: str
    foreign: bool = False


def text_graph(model: Path, provider: Provider, context_length: int | None) -> Path | Unlowered:
    """Return the graph that ``provider.text_passes`` write for an encoder, or why it keeps its form.

    Args:
        model: the ONNX file; its weights may be in files beside it whose names begin with its own.
        provider: the provider to lower for.
        context_length: tokens of the longest text; None if only the graph may say so.

    Raises:
        GraphError: the file is no valid graph.
        OSError: a file cannot be read or written.
    """
    if not provider.lowers_texts():
        return Unlowered(f"the provider {provider.name} has no kernels for texts without padding")
    names = [
        each.name for each in model.parent.iterdir() if each.name.startswith(model.name) and each.is_file()
    ]
    content = content_key(model.parent, names)
    key = cache_key(
        texts=content, provider=provider.name, form=provider.kernel_form(), context_length=context_length
    )
    folder = intact_folder("lowered", key)
    if folder is None:

        def build(target: Path) -> None:
            with collector_paused():
                _build(model, target, provider, context_length)

        folder = cached_folder("lowered", key, build, {"model": str(model), "provider": provider.name})
    lowered = folder / MODEL_FILE
    return lowered if lowered.is_file() else Unlowered(**json.loads((folder / _REASON).read_text("utf-8")))


def _build(model: Path, target: Path, provider: Provider, context_length: int | None) -> None:
    from ...graph_opt.graph.load import load_model  # the library of graphs, which a lowered one does not need
    from ...graph_opt.graph.saving import save_model
    from ...graph_opt.pipeline.canonical import canonical_text_passes
    from ...graph_opt.pipeline.pipeline import run

    graph = load_model(model)
    imports = [] if graph.producer_name == PRODUCER else canonical_text_passes()
    if context_length is not None:
        graph.metadata_props[CONTEXT_LENGTH] = str(context_length)
    try:
        lowered, _ = run(graph, [*imports, *provider.text_passes()])
    except UnsupportedAttentionError as error:
        found = Unlowered(str(error), bool(imports))
        with writing(target / _REASON):
            (target / _REASON).write_text(json.dumps(asdict(found)), encoding="utf-8")
        return
    save_model(lowered, target / MODEL_FILE)
