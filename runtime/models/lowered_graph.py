"""Lower the graph of a model for a provider, and write it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from ...exporter.package import MODEL_FILE
from ...graph_opt.graph.saving import WeightsFile, save_model
from ...graph_opt.lower.image_inputs import ImageInputsPass
from ...graph_opt.passes.base import GraphPass
from ...graph_opt.pipeline.exported import exported_passes
from ...graph_opt.pipeline.pipeline import run
from ...progress import Progress
from ...providers.base import Provider, RunnerConfig
from ...providers.lowering import Lowering, lowered
from .model_source import SourceModel

_WEIGHTS_FILE = "weights.data"


def build_lowered(
    files: SourceModel,
    folder: Path,
    provider: Provider,
    config: RunnerConfig,
    changes: Sequence[GraphPass],
    progress: Progress | None,
    others: Sequence[Path] = (),
) -> None:
    """Lower a model for a provider into ``folder``, as ``model.onnx``.

    Args:
        files: the portable model.
        folder: an empty folder.
        provider: the provider to lower for.
        config: the options of the runner, with ``context_length`` set.
        changes: passes that change the portable graph first.
        progress: called for every tensor written.
        others: results for other context lengths. Passes compute what depends on it at once, and leave what
            they compute from weights to the writer, so all have the latter in common.
    """
    model = lower(files, provider, config, changes)
    save_model(model, folder / MODEL_FILE, progress, weights=WeightsFile(_WEIGHTS_FILE, others))


def lower(
    files: SourceModel,
    provider: Provider,
    config: RunnerConfig,
    changes: Sequence[GraphPass] = (),
    *,
    without: type[GraphPass] | tuple[()] = (),
) -> ir.Model:
    """Return the graph of a model for a provider, with weights that are computed when they are written.

    Args:
        files: the portable model.
        provider: the provider to lower for.
        config: the options of the runner, with ``context_length`` set.
        changes: passes that change the portable graph first; inputs for pictures only where they are taken.
        without: a kind of pass to leave out.
    """
    first = exported_passes() if files.canonical else _portable_passes()

    def run_passes(way: Lowering) -> ir.Model:
        sees = provider.takes_images(way.config)
        taken = [each for each in changes if sees or not isinstance(each, ImageInputsPass)]
        own = [each for each in way.passes if not isinstance(each, without)]
        stored = not (changes or way.explicit) and provider.takes_stored(way.config)
        return run(files.load(stored=stored), [*first, *taken, *own], counted=False)[0]

    return lowered(provider, config, run_passes)


def _portable_passes() -> list[ir.passes.PassBase]:
    from ...graph_opt.pipeline.pipelines import portable_passes  # 40 ms

    return portable_passes()
