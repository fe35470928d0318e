"""Find the graph that a provider runs for a model, in the cache if it was lowered before."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...exporter.package import MODEL_FILE
from ...progress import Progress
from ...providers.base import Provider, RunnerConfig
from ...reports import human_bytes
from ...storage.cache import cache_key, cached_folder, intact_folder
from ...storage.root import cache_root, unusable
from ..process.garbage import collector_paused
from .model_source import SourceModel

if TYPE_CHECKING:
    from ...graph_opt.passes.base import GraphPass


def with_context(config: RunnerConfig, files: SourceModel) -> RunnerConfig:
    """Return ``config`` with its context length set, by default to that of the model.

    Raises:
        UsageError: the context length exceeds the model's maximum, or no file of the model states it.
    """
    known = files.context
    default = None if known is None else known.default
    wanted = default if config.context_length is None else config.context_length
    if wanted is None:
        raise UsageError(
            f"no file of {files.name} states its context length; add --context-length, or a config.json "
            "beside the ONNX file"
        )
    if known is not None and not 1 <= wanted <= known.longest:
        remedy = "" if wanted < 1 else _longer(files)
        raise UsageError(
            f"context_length {wanted} is not in [1, {known.longest}], the range of {files.name}{remedy}"
        )
    return dataclasses.replace(config, context_length=wanted)


def _longer(files: SourceModel) -> str:
    """Return how a model with a rotary embedding gets a longer context."""
    if files.canonical:
        return "; --rope-scaling yarn:4 makes it 4 times as long, if the model has a rotary embedding"
    return "" if files.package is None else "; export its checkpoint with --rope-scaling for a longer one"


def lora_branches(files: SourceModel, modules: Collection[str]) -> GraphPass:
    """Return the pass that adds branches for LoRA adapters to a model.

    Raises:
        UsageError: quantization has changed the inputs of the linear layers without a record of the change.
    """
    from ...graph_opt.lower.pipelines.lora import LoraPass
    from ...graph_opt.quantize.algorithms import layer_changes

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


def image_inputs() -> GraphPass:
    """Return the pass that lets pictures replace the embeddings of tokens."""
    from ...graph_opt.lower.image_inputs import ImageInputsPass

    return ImageInputsPass()


def lowered_model(
    files: SourceModel,
    provider: Provider,
    config: RunnerConfig,
    progress: Progress | None = None,
    *,
    changes: Sequence[GraphPass] = (),
) -> Path:
    """Return the ONNX file for ``provider.runner``; lower the model unless that is cached.

    Args:
        files: a portable model; a model that is already lowered is returned unchanged.
        provider: the provider to lower for.
        config: the options of the runner, with ``context_length`` set.
        progress: called for every tensor written.
        changes: passes that change the portable graph first, for instance to keep some layers; their names
            are part of the cache key, so they must contain all parameters.

    Raises:
        UsageError: ``changes`` are given for a model that is already lowered or is not lowered at all.
    """
    if files.lowered:
        return _unlowered(files, provider, changes)
    weights = cache_key(
        model=files.content_key,
        provider=provider.name,
        options=config.options,
        form=provider.kernel_form(),
        **({"change": _names(changes)} if changes else {}),
    )
    key = f"{weights}.{config.context_length}"
    found = intact_folder("lowered", key)
    if found is not None:
        return found / MODEL_FILE
    if not provider.passes(config):
        return _unlowered(files, provider, changes)
    others = _of_other_contexts(weights)
    if not others:
        _check_disk(files)

    def build(folder: Path) -> None:
        from .lowered_graph import build_lowered

        with files.unchanged(), collector_paused():
            build_lowered(files, folder, provider, config, changes, progress, others)

    about = {
        "model": files.name,
        "provider": provider.name,
        "context_length": config.context_length,
        "quantization": files.quantization,
    }
    return cached_folder("lowered", key, build, about) / MODEL_FILE


def _of_other_contexts(weights: str) -> list[Path]:
    """Return the graphs that were lowered from the same weights for other context lengths."""
    keys = sorted(path.name for path in (cache_root() / "lowered").glob(f"{weights}.*"))
    folders = (intact_folder("lowered", key) for key in keys)
    return [folder / MODEL_FILE for folder in folders if folder is not None]


def _check_disk(files: SourceModel) -> None:
    """Refuse a preparation that would fill the disk, before anything is read."""
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache_root()).free
    except OSError as error:
        raise unusable(error) from error
    needed = files.unprepared_bytes
    if needed > free:
        raise UsageError(
            f"preparing {files.name} writes {human_bytes(needed)} to {cache_root()}, which has "
            f"{human_bytes(free)} left; free some (carryall rm), or set CARRYALL_CACHE to a folder "
            "on another disk"
        )


def is_lowered(graph: Path) -> bool:
    """Whether a result of ``lowered_model`` is an entry of the cache, whose folder is named by its key."""
    return graph.parent.parent == cache_root() / "lowered"


def _unlowered(files: SourceModel, provider: Provider, changes: Sequence[GraphPass]) -> Path:
    if changes:
        raise UsageError(
            f"{files.name} is not lowered for {provider.name}, so {_names(changes)} is not possible"
        )
    return files.portable_file()


def _names(changes: Sequence[GraphPass]) -> str:
    return ", ".join(change.name for change in changes)
