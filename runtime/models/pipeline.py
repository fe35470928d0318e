"""Cut a model by layers over hosts of a Ray cluster: ``--pipeline ADDRESS``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ...errors import GraphError, UsageError
from ...progress import Progress
from ...providers.base import Provider, Runner, RunnerConfig
from ...providers.runners.pipeline_runner import PipelineRunner
from ..process.ray_cluster import connect, ray_module
from .fastest import AUTO
from .lowering import is_lowered, lowered_model
from .model_source import SourceModel
from .ray_stages import RayStage, StagePlace
from .split import is_split

_GROUP_SECONDS = 120.0


def check_stages(provider: str) -> None:
    """Check that a provider can run the stages of a pipeline.

    Raises:
        UsageError: it is a split, or is not named.
    """
    if is_split(provider) or provider == AUTO:
        raise UsageError(f"pipeline needs one provider for all stages, not '{provider}'; choose cpu")


class RayPipeline(PipelineRunner):
    """A pipeline of actors, with their places in the cluster.

    Args:
        stages: loaded stages.
        group: their placement group, which is removed with them.
        disconnects: whether this process leaves the cluster when the runner is closed.
    """

    def __init__(self, stages: list[RayStage], group: Any, *, disconnects: bool) -> None:
        super().__init__(stages, batches=len(stages))
        self._group, self._disconnects = group, disconnects

    def close(self) -> None:
        """End the actors, and leave the cluster."""
        super().close()
        _leave(self._group, disconnects=self._disconnects)


def pipeline_runner(
    files: SourceModel,
    provider: Provider,
    config: RunnerConfig,
    address: str,
    count: int,
    progress: Progress | None,
) -> tuple[Runner, list[Path]]:
    """Lower each stage's layers, start the stages in a cluster; return the runner and the lowered graphs.

    Args:
        files: a portable model.
        provider: the provider of each stage.
        config: options of each stage.
        address: of the cluster; see ``connect``.
        count: number of stages.
        progress: called for every tensor written.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: the model cannot be cut, or the cluster has no place for the stages.
        CarryallError: a stage cannot be loaded.
    """
    from ...graph_opt.analysis.layers import KeepLayersPass, balanced_ranges

    ray_module()  # before the model is prepared
    try:
        ranges = balanced_ranges(files.graph.graph, count)
        graphs = [
            lowered_model(files, provider, config, progress, changes=[KeepLayersPass(layers)])
            for layers in ranges
        ]
    except GraphError as error:
        raise UsageError(f"{files.name} cannot be cut into {count} stages: {error}") from error
    if not all(map(is_lowered, graphs)):
        raise UsageError(f"provider '{provider.name}' prepares no graphs that stages could load; choose cpu")
    disconnects = not ray_module().is_initialized()
    ray = connect(address)
    try:
        group, resources = _placed(ray, provider, config, count)
        stages: list[RayStage] = []
        try:
            for number, graph in enumerate(graphs):
                place = StagePlace(ray, group, number, count, resources)
                stages.append(RayStage(place, provider.name, graph, config))
            for stage in stages:
                stage.begin_loading()
            for stage in stages:
                stage.end_loading()
            return RayPipeline(stages, group, disconnects=disconnects), graphs
        except BaseException:
            _leave(group, disconnects=False)
            raise
    except BaseException:
        if disconnects:
            ray.shutdown()
        raise


def _placed(ray: Any, provider: Provider, config: RunnerConfig, count: int) -> tuple[Any, dict[str, float]]:
    """Reserve resources for each stage, on different nodes if there are enough; return the group and them.

    Raises:
        UsageError: the cluster lacks them.
    """
    from ray.util.placement_group import placement_group

    cpus, gpus = max(1, config.num_threads), int(bool(provider.vendors))
    bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    group = placement_group([bundle] * count, strategy="SPREAD")
    if not group.wait(_GROUP_SECONDS):
        _leave(group, disconnects=False)
        had = {name: ray.cluster_resources().get(name, 0.0) for name in bundle}
        raise UsageError(
            f"{count} stages need {bundle} each, and the Ray cluster has {had} in all, or others use it; add "
            "nodes, or lower pipeline_stages or num_threads"
        )
    return group, {"num_cpus": cpus, "num_gpus": gpus}


def _leave(group: Any, *, disconnects: bool) -> None:
    """Free the places of stages, and leave the cluster."""
    from ray.util.placement_group import remove_placement_group

    ray = ray_module()
    if not ray.is_initialized():
        return
    with contextlib.suppress(ray.exceptions.RayError):  # the cluster is gone, and the places with it
        remove_placement_group(group)
    if disconnects:
        ray.shutdown()
