"""``vision.onnx`` as a provider runs it, in the cache if it was lowered before."""

from __future__ import annotations

from pathlib import Path

from ...exporter.package import DATA_FILE, MODEL_FILE, TEXT_ENCODER_FILE
from ...providers.base import Provider, RunnerConfig
from ...storage.cache import cache_key, cached_folder, intact_folder
from ...storage.hashes import content_key
from ..process.garbage import collector_paused


def tower_graph(model: Path, provider: Provider, config: RunnerConfig, *, quantized: bool = False) -> Path:
    """Return the graph that ``provider.tower_passes`` write; the portable one if there are none.

    Args:
        model: ``vision.onnx``, beside the file of its weights.
        provider: the provider to lower for.
        config: options of the runner.
        quantized: whether the model behind it has quantized weights.

    Raises:
        GraphError: the file is no valid graph.
        OSError: a file cannot be read or written.
    """
    form = provider.tower_form(config, quantized=quantized)
    if form is None:
        return model
    names = sorted(each.name for each in model.parent.iterdir() if each.name.startswith(model.name))
    if model.name == TEXT_ENCODER_FILE and (model.parent / DATA_FILE).is_file():
        names.append(DATA_FILE)  # its embedding may be the decoder's
    key = cache_key(tower=content_key(model.parent, names), provider=provider.name, form=form)
    folder = intact_folder("lowered", key)
    if folder is None:

        def build(target: Path) -> None:
            # The library of graphs, which a lowered one does not need.
            from ...graph_opt.graph.load import load_model
            from ...graph_opt.graph.saving import save_model
            from ...graph_opt.pipeline.pipeline import run

            with collector_paused():
                tower = load_model(model)
                lowered, _ = run(tower, provider.tower_passes(config, tower, quantized=quantized))
                save_model(lowered, target / MODEL_FILE)

        folder = cached_folder("lowered", key, build, {"model": str(model), "provider": provider.name})
    return folder / MODEL_FILE
