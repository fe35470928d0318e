"""Stages of a pipeline as actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CarryallError, ProviderRuntimeError, UsageError
from ...exporter.package import MODEL_FILE
from ...providers import get_provider
from ...providers.base import Row, Runner, RunnerConfig, RunnerInfo
from ...providers.host.machine import usable_cores
from ...providers.runners.pipeline_runner import PipelineStage
from ...providers.runners.runner_process import software
from ...records import dataclass
from ...storage.cache import intact_folder
from ..process.ray_cluster import ship, unpacked

_FACTS = 64  # calls whose facts are not read
PATIENCE = 120.0  # seconds that a step may take in a stage
_START_SECONDS = 300.0  # for a node to be found, and a stage to be loaded

States = list[npt.NDArray[np.float32]]
Facts = tuple[int, float]  # bytes of KV, seconds of computing


class StageActor:
    """The actor: holds the runner of some layers."""

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._seconds = 0.0

    def describe(self) -> str:
        """Return the software of this node."""
        return software()

    def lacks(self, key: str) -> bool:
        """Whether the cache of this node has no lowered graph of a key."""
        return intact_folder("lowered", key) is None

    def open(
        self, provider: str, key: str, archive: bytes | None, config: RunnerConfig, stages_here: int
    ) -> RunnerInfo:
        """Load the layers; return the facts of their runner.

        Args:
            provider: the name of the provider.
            key: of the lowered graph.
            archive: its folder, if this node lacks it.
            config: without threads, the stages of a node share its usable cores.
            stages_here: the number of stages on this node.
        """
        folder = intact_folder("lowered", key) if archive is None else unpacked(key, archive)
        if folder is None:
            raise ProviderRuntimeError(f"the cache of this node has lost the lowered graph {key}")
        threads = config.num_threads or max(1, usable_cores() // stages_here)
        config = dataclasses.replace(config, num_threads=threads)
        self._runner = get_provider(provider).runner(folder / MODEL_FILE, config)
        return self._runner.info

    def compute(self, rows: list[Row], states: States | None) -> tuple[States, Facts]:
        """Run one step, on the states of the stage before."""
        if states is not None:
            rows = [
                dataclasses.replace(row, hidden_states=own) for row, own in zip(rows, states, strict=True)
            ]
        begun = time.perf_counter()
        results = self._opened().forward(rows)
        self._seconds += time.perf_counter() - begun
        return results, self._facts()

    def ask(self, method: str, *arguments: Any) -> tuple[Any, Facts]:
        """Let the runner carry out a method."""
        result = getattr(self._opened(), method)(*arguments)
        return result, self._facts()

    def _opened(self) -> Runner:
        if self._runner is None:
            raise ProviderRuntimeError("the stage is not loaded")
        return self._runner

    def _facts(self) -> Facts:
        return self._opened().kv_bytes, self._seconds


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where a stage runs.

    Args:
        ray: the ray module, connected.
        group: the placement group.
        number: of the stage, and of its bundle in the group.
        stages: the number of all stages.
        resources: of the actor, as options of Ray: those of its bundle.
    """

    ray: Any
    group: Any
    number: int
    stages: int
    resources: dict[str, float]

    def actor(self) -> Any:
        """Start the actor; it waits for its resources."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.number)
        options = {**self.resources, "scheduling_strategy": strategy, "max_restarts": 0}
        return self.ray.remote(**options)(StageActor).remote()

    def stages_here(self) -> int:
        """Return the number of stages on the node of this one."""
        from ray.util import placement_group_table

        nodes: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        return sum(node == nodes.get(self.number) for node in nodes.values()) or 1


class RayStage(PipelineStage):
    """A stage in an actor; call ``load`` before anything else.

    Calls of an actor are carried out in order. States go from actor to actor, without this process if they
    are large (Ray's object store).

    Args:
        place: where it runs.
        provider: the name of its provider.
        graph: the lowered graph, in the cache of this process.
        config: the options of its runner.
    """

    def __init__(self, place: StagePlace, provider: str, graph: Path, config: RunnerConfig) -> None:
        self._place, self._provider, self._graph = place, provider, graph
        self._config = dataclasses.replace(config, on_fallback=None)  # functions cannot be pickled
        self._ray = place.ray
        self._facts: Facts = (0, 0.0)
        self._awaited = deque[Any](maxlen=_FACTS)  # references of later facts, in order
        self._reading = threading.Lock()  # any thread may read facts
        self._earlier_seconds = 0.0  # of actors that have ended
        self.actor = place.actor()
        self._loading: Any = None

    def begin_loading(self) -> None:
        """Let the actor load its layers, which are sent to it if its node lacks them.

        Raises:
            UsageError: the actor runs another version.
            ProviderRuntimeError: it does not start.
        """
        theirs = self._get(self.actor.describe.remote(), _START_SECONDS)
        if theirs != software():
            raise UsageError(
                f"stage {self._place.number} of the pipeline runs {theirs}, and this process {software()}; "
                "install the same version on every node"
            )
        folder, archive = self._graph.parent, None
        if self._get(self.actor.lacks.remote(folder.name), _START_SECONDS):
            archive = self._ray.put(ship(str(folder)))
        self._loading = self.actor.open.remote(
            self._provider, folder.name, archive, self._config, self._place.stages_here()
        )

    def end_loading(self) -> None:
        """Wait until the layers are loaded.

        Raises:
            CarryallError: the actor raised it.
        """
        self.info: RunnerInfo = self._get(self._loading, _START_SECONDS)
        self._loading = None

    def begin(self, rows: Sequence[Row], states: Any) -> Any:
        """See ``PipelineStage``; what is begun is a reference of states."""
        result, facts = self.actor.compute.options(num_returns=2).remote(list(rows), states)
        self._awaited.append(facts)
        return result

    def end(self, begun: Any) -> States:
        """See ``PipelineStage``."""
        states: States = self._get(begun, PATIENCE)
        return states

    def alive(self) -> bool:
        """Whether the actor answers."""
        try:
            self._get(self.actor.describe.remote(), PATIENCE)
        except CarryallError:
            return False
        return True

    def restart(self) -> None:
        """Start another actor in the place of the stage; see ``PipelineStage``."""
        self._earlier_seconds, self._facts = self.busy_seconds, (0, 0.0)
        self._awaited.clear()
        self._ray.kill(self.actor)
        self.actor = self._place.actor()
        self.begin_loading()
        self.end_loading()

    def release(self, slot: int) -> None:
        """Free a slot when the actor has done what it was given; the caller does not wait."""
        self._begin_asking("release", slot)

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache as of the actor's last answer, in bytes."""
        return self._latest()[0]

    @property
    def busy_seconds(self) -> float:
        """How long its actors have computed rows, as of the last answer."""
        return self._earlier_seconds + self._latest()[1]

    def close(self) -> None:
        """End the actor."""
        self._ray.kill(self.actor)

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._get(self._begin_asking(method, *arguments), PATIENCE)

    def _begin_asking(self, method: str, *arguments: Any) -> Any:
        result, facts = self.actor.ask.options(num_returns=2).remote(method, *arguments)
        self._awaited.append(facts)
        return result

    def _latest(self) -> Facts:
        """Return the facts of the last answer that has come."""
        with self._reading:
            while self._awaited and self._ray.wait([self._awaited[0]], timeout=0)[0]:
                with contextlib.suppress(
                    self._ray.exceptions.RayError
                ):  # the caller of a failed call was told
                    self._facts = self._ray.get(self._awaited[0])
                self._awaited.popleft()
            return self._facts

    def _get(self, reference: Any, seconds: float) -> Any:
        """Return the value of a reference.

        Raises:
            ProviderRuntimeError: an actor has ended, or does not answer; then it is ended.
            CarryallError: an actor raised it.
        """
        errors, name = self._ray.exceptions, f"stage {self._place.number} of {self._place.stages}"
        try:
            return self._ray.get(reference, timeout=seconds)
        except errors.GetTimeoutError as error:
            self._ray.kill(self.actor)
            raise ProviderRuntimeError(f"{name} did not answer for {seconds:g} s; it was ended") from error
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, CarryallError):
                raise cause from error
            raise ProviderRuntimeError(f"{name} failed: {error}") from error
        except errors.RayError as error:
            raise ProviderRuntimeError(f"{name}, or one before it, has ended: {error}") from error
