"""Lower the graph of a model for a provider, and write it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from ...contract import EXPLICIT_KV
from ...errors import UnsupportedAttentionError
from ...exporter.package import MODEL_FILE
from ...graph_opt.graph.saving import WeightsFile, save_model
from ...graph_opt.passes.base import GraphPass
from ...graph_opt.pipeline.exported import exported_passes
from ...graph_opt.pipeline.pipeline import run
from ...progress import Progress
from ...providers.base import Provider, RunnerConfig
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
        changes: passes that change the portable graph first.
        without: a kind of pass to leave out.
    """
    first = [*(exported_passes() if files.canonical else _portable_passes()), *changes]
    try:
        own = [each for each in provider.passes(config) if not isinstance(each, without)]
        stacked = not changes and provider.takes_stacks(config)
        return run(files.load(stacked=stacked), [*first, *own], counted=False)[0]
    except UnsupportedAttentionError as error:
        explicit = provider.explicit_passes(config)
        if explicit is None:
            raise error.refusal() from error
        model, _ = run(files.load(), [*first, *explicit], counted=False)
        model.metadata_props[EXPLICIT_KV] = str(error)
        return model


def _portable_passes() -> list[ir.passes.PassBase]:
    from ...graph_opt.pipeline.pipelines import portable_passes  # 40 ms

    return portable_passes()
