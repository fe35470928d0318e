"""Workers on a Ray cluster. The process that started the job keeps the journal."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....errors import CarryallError, ProviderRuntimeError
from ...process.ray_cluster import connect, ship, unpacked
from ..inputs.lines import BatchLine
from ..jobs.journal import LineResult
from .pool import Give, Take, Worker, WorkerLost, WorkerPool
from .worker import WorkerSpec, open_worker

# Lines of one call. Slots run empty at the end of a call, so a call should have many lines.
_CALL_LINES = 512
_WAIT_SECONDS = 0.2


def cluster_pool(
    spec: WorkerSpec, address: str, workers: int, resources: Mapping[str, float] | None = None
) -> WorkerPool:
    """Return a pool of workers on a cluster; each is an actor that loads the model.

    Args:
        spec: the specification of the workers.
        address: address of the cluster; ``local`` starts one.
        workers: number of workers. Workers without free resources wait, so an autoscaling cluster grows.
        resources: resources of each actor, such as ``{"num_gpus": 1}``; None is one CPU.

    Raises:
        MissingExtraError: ray is not installed.
        UsageError: there is no cluster, or the model cannot be sent to it.
    """
    ray = connect(address)
    shipped = ship(spec.model)
    packed = None if shipped is None else ray.put(shipped)
    name = "" if shipped is None else hashlib.sha256(shipped).hexdigest()[:32]
    openers: list[Callable[[], Worker]] = [
        functools.partial(
            ClusterWorker,
            ray,
            replace(spec, worker=f"ray-{number}"),
            packed,
            name,
            resources or {"num_cpus": 1},
        )
        for number in range(workers)
    ]
    return WorkerPool(openers)


class ModelActor:
    """The actor: loads a model and answers lines.

    Args:
        spec: the specification of the worker.
        name: name of the model's archive; empty if there is no archive.
        archive: tar archive of the model's folder; None if the node resolves the model itself.
    """

    def __init__(self, spec: WorkerSpec, name: str, archive: bytes | None) -> None:
        if archive is not None:
            spec = replace(spec, model=str(unpacked(name, archive)))
        self._engine = open_worker(spec)

    def ready(self) -> None:
        """Return once the model is loaded."""

    def answer(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        """Return the answers of lines, in any order."""
        return list(self._engine.run(iter(lines), threading.Event()))


class ClusterWorker:
    """The local side of an actor; see ``Worker``.

    Args:
        ray: the ray module, connected.
        spec: the specification of the worker.
        packed: the reference of the model's archive in the object store, or None.
        name: the name of the archive.
        resources: the resources of the actor.
    """

    def __init__(
        self, ray: Any, spec: WorkerSpec, packed: Any, name: str, resources: Mapping[str, float]
    ) -> None:
        self.name = spec.worker or ""
        self._ray = ray
        actor = ray.remote(**resources)(ModelActor)
        self._actor = actor.remote(spec, name, packed)

    def exchange(self, give: Give, take: Take, over: threading.Event) -> None:
        # An actor may wait long for resources. It takes no lines before it is ready, so others get them.
        ready = self._actor.ready.remote()
        while not self._ray.wait([ready], timeout=_WAIT_SECONDS)[0]:
            if over.is_set() or give(0) == []:
                return
        self._result(ready)
        while not over.is_set():
            lines = give(_CALL_LINES)
            if lines is None:
                time.sleep(_WAIT_SECONDS)
            elif not lines:
                return
            else:
                call = self._actor.answer.remote(lines)
                self._wait(call, over)
                if not over.is_set():
                    take(self._result(call))

    def _wait(self, call: Any, over: threading.Event) -> None:
        while not over.is_set() and not self._ray.wait([call], timeout=_WAIT_SECONDS)[0]:
            pass

    def _result(self, call: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(call)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, CarryallError) else error
            raise cause if isinstance(cause, CarryallError) else ProviderRuntimeError(str(error)) from error
        except errors.RayError as error:  # the actor or its node died
            cause = getattr(error, "cause", None)
            if isinstance(cause, CarryallError):
                raise cause from error
            raise WorkerLost(f"worker {self.name}: {error}") from error

    def close(self) -> None:
        """End the actor."""
        self._ray.kill(self._actor)
