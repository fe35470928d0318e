"""Portable model to the graph that a provider runs, through the cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ...errors import UsageError
from ...exporter.package import MODEL_FILE
from ...exporter.save import save_model
from ...graph_opt.passes.base import GraphPass
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.pipeline.pipelines import portable_passes
from ...progress import Progress
from ...providers.base import Provider, RunnerConfig
from .cache import cache_key, cached_folder
from .model_source import SourceModel


def with_context(config: RunnerConfig, files: SourceModel) -> RunnerConfig:
    """``config`` with the context length that holds for this model.

    Raises:
        UsageError: it is longer than the model's.
    """
    wanted = config.context_length or files.default_context_length
    if not 1 <= wanted <= files.context_length:
        raise UsageError(
            f"context length {wanted} is not in [1, {files.context_length}], what {files.name} was made for"
        )
    return dataclasses.replace(config, context_length=wanted)


def lowered_model(
    files: SourceModel,
    provider: Provider,
    config: RunnerConfig,
    progress: Progress | None = None,
    *,
    change: GraphPass | None = None,
) -> Path:
    """The ONNX file for ``provider.runner``, lowered now or found in the cache.

    Args:
        files: a portable model; one that is lowered already is taken as it is.
        provider: whose kernels to use.
        config: as it will be given to the runner, its ``context_length`` set.
        progress: told about every tensor written.
        change: a pass over the portable graph, to lower less or other than the whole; its name must say all
            that it depends on.

    Raises:
        UsageError: such a change is wanted of a graph that was lowered elsewhere.
    """
    passes = provider.passes(config)
    if change is not None and (files.lowered or not passes):
        raise UsageError(f"{files.name} runs as it is, without a lowering, so {change.name} is not possible")
    if not passes or files.lowered:
        return files.model_path
    key = cache_key(
        model=files.content_key,
        provider=provider.name,
        context_length=config.context_length,
        options=config.options,
        **({"change": change.name} if change is not None else {}),
    )
    first = [*portable_passes(), *([change] if change is not None else [])]

    def build(folder: Path) -> None:
        with files.unchanged():
            write(folder)

    def write(folder: Path) -> None:
        for file, own in {MODEL_FILE: passes, **provider.companions(config)}.items():
            model, _ = run(files.load(), [*first, *own])
            save_model(model, folder / file, progress)

    about = {"model": files.name, "provider": provider.name, "context_length": config.context_length}
    return cached_folder("lowered", key, build, about) / MODEL_FILE
