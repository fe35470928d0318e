"""Open a model for batch jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ....errors import UsageError
from ....progress import Progress
from ....records import dataclass
from ...api.llm import LLM
from ...api.load_encoder import encoder_folder, load_encoder
from ...api.requests import RequestFactory
from ...engine.config import EngineConfig
from ...engine.engine import Engine
from ...models.config import ModelConfig, split_fields
from ...models.loading import LoadedModel, load_model
from .endpoints import Preparer
from .offline import WINDOW_LINES, OfflineEngine
from .transcriptions import TranscriptionWorker
from .vectors import VectorWorker

Worker = OfflineEngine | TranscriptionWorker | VectorWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The specification of a worker; it can be pickled for other processes.

    Args:
        model: as for ``load_model``.
        loading: fields of ``ModelConfig`` and ``EngineConfig``.
        label: the model name in responses; None takes ``model``.
        sampling: defaults of the sampling options, named as in a request's body.
        seed: the seed of the job; see ``Preparer``.
        created: see ``Preparer``.
        worker: the worker name in the answers; None takes the provider's name.
        window: number of lines that are read ahead and sorted.
    """

    model: str
    loading: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    created: int = 0
    worker: str | None = None
    window: int = WINDOW_LINES


def open_worker(spec: WorkerSpec, progress: Progress | None = None) -> Worker:
    """Load a worker's model: a language model, one that hears, or an encoder.

    Raises:
        CarryallError: as ``load_model``, ``load_encoder``.
        UsageError: an option is given that encoders do not have.
    """
    of_model, of_engine = split_fields(spec.loading, "a batch job")
    if (folder := encoder_folder(spec.model)) is not None:
        from ...api.token_classifier import TokenClassifier  # imports onnxruntime

        if other := sorted((of_model.keys() | of_engine.keys() | spec.sampling.keys()) - {"provider"}):
            raise UsageError(f"{spec.model} is an encoder; it has no option {other[0]}")
        provider = of_model.get("provider") or ModelConfig(model=spec.model).provider
        encoder = load_encoder(folder, provider, {}, warm_up=False)
        if isinstance(encoder, TokenClassifier):
            raise UsageError(f"{spec.model} classifies tokens; a batch job takes encoders of texts")
        return VectorWorker(encoder, spec.label or spec.model, spec.worker or provider)
    slots = of_engine.get("max_slots")
    loaded = load_model(spec.model, max_slots=slots, progress=progress, **of_model)
    if loaded.hears:
        llm = LLM(loaded, engine_config=_engine_config(of_engine))
        return TranscriptionWorker(llm, spec.label or spec.model, spec.worker or loaded.provider)
    return worker_of(loaded, spec)


def worker_of(loaded: LoadedModel, spec: WorkerSpec) -> OfflineEngine:
    """Return a worker with a loaded model, which the worker closes."""
    _, of_engine = split_fields(spec.loading, "a batch job")
    engine = Engine(loaded.runner, _engine_config(of_engine), loaded.proposer, loaded.identity)
    preparer = Preparer(
        RequestFactory(loaded, engine.config),
        spec.label or spec.model,
        embedding_size=loaded.runner.info.embedding_size,
        defaults={**loaded.defaults.served, **spec.sampling},
        seed=spec.seed,
        created=spec.created,
    )
    return OfflineEngine(
        engine,
        preparer,
        worker=spec.worker or loaded.provider,
        window=spec.window,
        sees=loaded.reads_images,
    )


def _engine_config(fields: Mapping[str, Any]) -> EngineConfig:
    """Return options for throughput, not latency: prefill starts at once, however much it slows a step."""
    return EngineConfig(**{"max_step_slowdown": math.inf, **fields})
