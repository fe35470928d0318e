"""Open a model for batch jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....progress import Progress
from ...api.requests import RequestFactory
from ...engine.config import EngineConfig
from ...engine.engine import Engine
from ...models.config import split_fields
from ...models.loading import LoadedModel, load_model
from .endpoints import Preparer
from .offline import WINDOW_LINES, OfflineEngine


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


def open_worker(spec: WorkerSpec, progress: Progress | None = None) -> OfflineEngine:
    """Load a worker's model.

    Raises:
        CarryallError: as ``load_model``.
    """
    of_model, of_engine = split_fields(spec.loading, "a batch job")
    slots = of_engine.get("max_slots")
    return worker_of(load_model(spec.model, max_slots=slots, progress=progress, **of_model), spec)


def worker_of(loaded: LoadedModel, spec: WorkerSpec) -> OfflineEngine:
    """Return a worker with a loaded model, which the worker closes."""
    # Batch jobs need throughput, not latency: prefill starts at once, however much it slows a step.
    _, of_engine = split_fields(spec.loading, "a batch job")
    config = EngineConfig(**{"max_step_slowdown": math.inf, **of_engine})
    engine = Engine(loaded.runner, config, loaded.proposer, loaded.identity)
    preparer = Preparer(
        RequestFactory(loaded),
        spec.label or spec.model,
        embedding_size=loaded.runner.info.embedding_size,
        defaults={**loaded.defaults.served, **spec.sampling},
        seed=spec.seed,
        created=spec.created,
    )
    return OfflineEngine(engine, preparer, worker=spec.worker or loaded.provider, window=spec.window)
