"""Lower a portable model to the graph that a provider runs; the result is cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import onnx_ir as ir

from ...contract import EXPLICIT_KV
from ...errors import UnsupportedAttentionError, UsageError
from ...exporter.package import MODEL_FILE
from ...exporter.save import save_model
from ...graph_opt.lower.pipelines.lora import LoraPass
from ...graph_opt.passes.base import GraphPass
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.pipeline.pipelines import portable_passes
from ...graph_opt.quantize.algorithms import layer_changes
from ...progress import Progress
from ...providers.base import Provider, RunnerConfig
from .cache import cache_key, cached_folder
from .model_source import SourceModel


def with_context(config: RunnerConfig, files: SourceModel) -> RunnerConfig:
    """Return ``config`` with its context length set, by default to that of the model.

    Raises:
        UsageError: the context length exceeds the model's maximum, or no file of the model states it.
    """
    known = files.context
    wanted = config.context_length or (None if known is None else known.default)
    if wanted is None:
        raise UsageError(
            f"no file of {files.name} states its context length; add --context-length, or a config.json "
            "beside the ONNX file"
        )
    if known is not None and not 1 <= wanted <= known.longest:
        raise UsageError(f"context_length {wanted} is not in [1, {known.longest}], the range of {files.name}")
    return dataclasses.replace(config, context_length=wanted)


def lora_branches(files: SourceModel, modules: Collection[str]) -> LoraPass:
    """Return the pass that adds branches for LoRA adapters to a model.

    Raises:
        UsageError: quantization has changed the inputs of the linear layers without a record of the change.
    """
    record = {} if files.package is None else files.package.record.quantization or {}
    changes = [name for name in ("rotate", "smooth") if record.get(name)]
    changes += ["awq"] if "awq" in str(record.get("algorithm")) else []
    if changes and layer_changes.KEY not in files.graph.graph.metadata_props:
        raise UsageError(
            f"{files.name} was quantized with {' and '.join(changes)} by an older version, which did not "
            "record how this changes the inputs of linear layers, so no LoRA adapter can be fitted to it; "
            "quantize the model again"
        )
    return LoraPass(modules)


def lowered_model(
    files: SourceModel,
    provider: Provider,
    config: RunnerConfig,
    progress: Progress | None = None,
    *,
    change: GraphPass | None = None,
) -> Path:
    """Return the ONNX file for ``provider.runner``; lower the model unless that is cached.

    Args:
        files: a portable model; a model that is already lowered is returned unchanged.
        provider: the provider to lower for.
        config: the options of the runner, with ``context_length`` set.
        progress: called for every tensor written.
        change: a pass that changes the portable graph first, for instance to keep some layers; its name is
            part of the cache key, so it must contain all parameters.

    Raises:
        UsageError: ``change`` is given for a model that is already lowered or is not lowered at all.
    """
    passes = provider.passes(config)
    if change is not None and (files.lowered or not passes):
        raise UsageError(f"{files.name} is not lowered for {provider.name}, so {change.name} is not possible")
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
            try:
                model, _ = run(files.load(), [*first, *own])
            except UnsupportedAttentionError as error:
                save_model(explicit(error), folder / MODEL_FILE, progress)
                return
            save_model(model, folder / file, progress)

    def explicit(error: UnsupportedAttentionError) -> ir.Model:
        own = provider.explicit_passes(config)
        if own is None:
            raise error.refusal() from error
        model, _ = run(files.load(), [*first, *own])
        model.metadata_props[EXPLICIT_KV] = str(error)
        return model

    about = {"model": files.name, "provider": provider.name, "context_length": config.context_length}
    return cached_folder("lowered", key, build, about) / MODEL_FILE
