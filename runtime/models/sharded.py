"""Cut a model by weights over several processes: ``--tensor-parallel 2``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ...errors import GraphError, UsageError
from ...progress import Progress
from ...providers import get_provider
from ...providers.base import Provider, Runner, RunnerConfig
from ...providers.host.machine import usable_cores
from ...providers.numa import nodes_of_ranks, numa_nodes
from ...providers.runners.sharded_runner import ShardedRunner
from .fastest import AUTO
from .lowering import lowered_model
from .model_source import SourceModel
from .split import is_split


def check_ranks(count: int, provider: str) -> None:
    """Check that a provider can run a model over ``count`` processes.

    Raises:
        UsageError: it cannot.
    """
    if count > 1 and (is_split(provider) or provider == AUTO or not get_provider(provider).takes_ranks):
        raise UsageError(
            f"tensor_parallel {count} needs a provider that adds up over processes, which '{provider}' does "
            "not; choose cpu"
        )


def sharded_runner(
    files: SourceModel,
    provider: Provider,
    config: RunnerConfig,
    count: int,
    progress: Progress | None = None,
    *,
    numa: bool = False,
) -> tuple[Runner, list[Path]]:
    """Lower each rank's part and open all; return the runner and the lowered graphs.

    Args:
        files: a portable model.
        provider: the provider of each process.
        config: options of each process; without threads, the processes share the usable cores.
        count: number of processes.
        progress: called for every tensor written.
        numa: bind each process to one of this machine's NUMA nodes.

    Raises:
        UsageError: the model cannot be cut, the processes cannot be bound, or carryall's kernels are not in
            use.
    """
    from ...graph_opt.shard.shard_pass import ShardPass

    if config.options.get("kernels") != "carryall":
        raise UsageError(
            f"tensor_parallel {count} needs carryall's kernels; build them with "
            "`carryall doctor --build-kernels`"
        )
    nodes = nodes_of_ranks(numa_nodes(), count) if numa else None
    rank_config = dataclasses.replace(
        config, num_threads=config.num_threads or max(1, usable_cores() // count)
    )
    try:
        passes = [ShardPass(rank, count) for rank in range(count)]
        configs = [provider.rank_config(rank_config, rank) for rank in range(count)]
        graphs = [
            lowered_model(files, provider, config, progress, changes=[each])
            for each, config in zip(passes, configs, strict=True)
        ]
    except GraphError as error:
        raise UsageError(f"{files.name} cannot be cut over {count} processes: {error}") from error
    return ShardedRunner(provider.name, graphs, configs, nodes), graphs
