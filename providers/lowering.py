"""Which passes of a provider lower a graph: those with its best attention kernels that compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..contract import EXPLICIT_KV, SLOT_KV
from ..errors import UnsupportedAttentionError
from ..records import dataclass
from .base import Provider, RunnerConfig

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class Lowering:
    """A way to lower a graph.

    Args:
        config: the options that the passes are for.
        passes: in order.
        explicit: whether they keep past in, present out.
    """

    config: RunnerConfig
    passes: Sequence[ir.passes.PassBase]
    explicit: bool = False


def lowered(provider: Provider, config: RunnerConfig, lower: Callable[[Lowering], ir.Model]) -> ir.Model:
    """Lower a graph in the first way of ``provider.lowerings`` that takes its attention, else explicitly.

    Args:
        provider: the provider to lower for.
        config: the options of the runner, with ``context_length`` set.
        lower: runs the passes on the portable graph.

    Returns:
        The graph; its metadata have the reason why it was not lowered in the first way.

    Raises:
        UnsupportedAttentionError: the provider has no passes for the attention of the graph.
        GraphError: a pass failed.
    """
    ways = provider.lowerings(config)
    refusals: list[UnsupportedAttentionError] = []
    for way in ways:
        try:
            model = lower(Lowering(way, provider.passes(way)))
        except UnsupportedAttentionError as error:
            refusals.append(error)
            continue
        if refusals:
            model.metadata_props[SLOT_KV] = str(refusals[0])
        return model
    explicit = provider.explicit_passes(config)
    if explicit is None:
        raise refusals[-1].refusal() from refusals[-1]
    model = lower(Lowering(ways[0], explicit, explicit=True))
    model.metadata_props[EXPLICIT_KV] = str(refusals[0])
    return model
