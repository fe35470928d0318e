"""Choose which layers run where, by the memory and the bandwidth of each place: ``--split cuda,cpu``.

``--split auto`` names the places itself, for a model that the devices of a provider do not hold.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Sequence

from ...contract import is_past
from ...errors import CarryallError, UsageError
from ...providers import get_provider
from ...providers.base import Provider, RunnerConfig
from ...providers.host import machine
from ...records import dataclass
from ...reports import human_bytes
from .model_source import SourceModel
from .split import is_split, name_and_device, with_device

_log = logging.getLogger(__name__)

_NAME = re.compile(r"\w+(:[\w.]+)?")
_SHARE = 0.9  # of the free memory, where a provider has no option for it
_BLOCK = 256  # positions of the largest blocks of KV on a device; a further one is for padding
_FLOAT_BITS = 32  # of KV in a portable graph
_HOST = "cpu"  # the provider that computes what devices do not hold


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A device that can run layers.

    Args:
        name: the provider, with its device if that was chosen.
        room: bytes for weights and KV.
        bandwidth: bytes/s that it reads.
        weights: bytes of the weights of each layer, there.
        kv: bytes of the KV of a layer for one text of the whole context.
        fixed: bytes that every part of the model has: embeddings.
    """

    name: str
    room: int
    bandwidth: float
    weights: Sequence[int]
    kv: int
    fixed: int

    @property
    def needed(self) -> int:
        """Bytes that all layers would take there."""
        return sum(self.weights) + self.kv * len(self.weights) + self.fixed

    def seconds(self, begin: int, end: int) -> float:
        """Return the seconds to read the weights of layers; infinite if they have no room."""
        if begin == end:
            return 0.0
        weights = sum(self.weights[begin:end])
        needed = weights + self.kv * (end - begin) + self.fixed
        return weights / self.bandwidth if needed <= self.room else math.inf


@dataclass(frozen=True, slots=True)
class PlacedLayers:
    """Which layers run where, and why.

    Args:
        provider: a split by ranges of layers, or the only place: ``cuda:0-11,cpu:12-27``.
        places: what was known of each place.
        needed: bytes of the weights of the model, and of the KV of one text, on the first place.
    """

    provider: str
    places: Sequence[LayerPlace]
    needed: int

    def __str__(self) -> str:
        known = (
            f"{place.name} has {human_bytes(place.room)} and reads {place.bandwidth / 1e9:.0f} GB/s"
            for place in self.places
        )
        return (
            f"layers by memory and bandwidth: {self.provider}; the model needs {human_bytes(self.needed)}, "
            f"{', '.join(known)}"
        )


def names_places(provider: str) -> bool:
    """Whether the value of ``provider`` names places without their layers: ``cuda,cpu``."""
    names = provider.split(",")
    return len(names) > 1 and all(_NAME.fullmatch(name.strip()) for name in names)


def candidate(files: SourceModel, provider: Provider, config: RunnerConfig) -> str:
    """Return where to try a model on a provider: its name, or places if its devices need the CPU's help.

    Args:
        files: a model.
        provider: an available provider.
        config: options of the runner, with ``context_length`` set.
    """
    try:
        if provider.device_memory(provider.checked_options(config.options)) is None:
            return provider.name
        devices = [f"{provider.name}:{device}" for device in provider.device_names()]
        text = ",".join([*(devices if len(devices) > 1 else [provider.name]), _HOST])
        placed = placed_layers(files, text, config)
    except CarryallError as error:  # the trial of the provider alone gives the reason that counts
        _log.info("%s is tried alone: %s", provider.name, error)
        return provider.name
    return text if is_split(placed.provider) else provider.name


def placed_layers(files: SourceModel, text: str, config: RunnerConfig) -> PlacedLayers:
    """Return the split, or the only place, that reads the weights of a decoding step in the least time.

    Each place gets a range of layers, in the order of the text, or none. A place holds the weights of its
    layers and the KV of one text of the whole context, so it may have fewer slots than ``config`` asks for.

    Args:
        files: a portable model.
        text: places, such as ``cuda:0,cpu``.
        config: options of every part, with ``context_length`` set.

    Raises:
        UsageError: the places cannot hold the model, share the memory of this machine, or have a bandwidth
            that is not known.
    """
    from ...graph_opt.analysis.layers import layer_costs

    layers = layer_costs(files.graph.graph)
    names = [name.strip() for name in text.split(",")]
    places = [_place(files, name, config, [layer.size for layer in layers]) for name in names]
    if sum(_on_host(name, config) for name in names) > 1:
        raise UsageError(f"places of '{text}' share the memory of this machine; name the layers of each")
    cuts = least_time(places, [layer.cached for layer in layers])
    if cuts is None:
        held = ", ".join(f"{place.name} has {human_bytes(place.room)} for it" for place in places)
        whole = places[0]
        raise UsageError(
            f"'{text}' cannot hold {files.name}: it has {human_bytes(sum(whole.weights) + whole.fixed)} of "
            f"weights and {human_bytes(whole.kv * len(layers))} of KV for {config.context_length} tokens on "
            f"{whole.name}; {held}. Lower --context-length, or choose weights with fewer bits"
        )
    firsts = [layer.number for layer in layers]
    firsts[0] = 0
    parts = [
        (place.name, firsts[begin], firsts[end] - 1 if end < len(layers) else firsts[-1])
        for place, (begin, end) in zip(places, itertools.pairwise(cuts), strict=True)
        if begin < end
    ]
    ranges = ",".join(f"{name}:{first}-{last}" for name, first, last in parts)
    placed = PlacedLayers(ranges if len(parts) > 1 else parts[0][0], places, places[0].needed)
    _log.info("%s", placed)
    return placed


def least_time(places: Sequence[LayerPlace], cached: Sequence[bool]) -> list[int] | None:
    """Return the layers at which each place begins, and their number, for the least time of a step.

    By dynamic programming over the places and the layers that they and those before them have.

    Args:
        places: in the order of their layers.
        cached: of each layer, whether it has KV; a part without any cannot run.

    Returns:
        None if the places have no room for all layers.
    """
    total = len(cached)
    caches = [0, *itertools.accumulate(cached)]
    best: list[tuple[float, list[int]]] = [(0.0, [0])] + [(math.inf, [])] * total
    for place in places:
        best = [
            min(
                (
                    (seconds + place.seconds(begin, end), [*cuts, end])
                    for begin, (seconds, cuts) in enumerate(best[: end + 1])
                    if begin == end or caches[end] > caches[begin]
                ),
                key=lambda found: found[0],
            )
            for end in range(total + 1)
        ]
    seconds, cuts = best[total]
    return cuts if seconds < math.inf else None


def _configured(name: str, config: RunnerConfig) -> tuple[str, RunnerConfig]:
    provider, device = name_and_device(name)
    own = config if device is None else with_device(config, provider, device)
    return provider, get_provider(provider).resolve_options(own)


def _on_host(name: str, config: RunnerConfig) -> bool:
    provider, own = _configured(name, config)
    return get_provider(provider).device_memory(own.options) is None


def _place(files: SourceModel, name: str, config: RunnerConfig, sizes: Sequence[int]) -> LayerPlace:
    """Return a place, with the sizes of the model's layers as it would hold them.

    Args:
        files: a portable model.
        name: of the place.
        config: options of every part.
        sizes: bytes of the portable weights of each layer.
    """
    from ...graph_opt.graph.graph_facts import initializers
    from ...graph_opt.lower.paged_kv import TABLE
    from .lowered_graph import lower

    provider, own = _configured(name, config)
    target = get_provider(provider)
    bandwidth = target.memory_bandwidth(own.options)
    if bandwidth is None:
        raise UsageError(f"the memory bandwidth of {name} is not known; name the layers: {name}:0-11,...")
    memory = target.device_memory(own.options)
    free = machine.memory()[1] if memory is None else memory.total - memory.used
    lowered = lower(files, target, own)  # its weights are not computed
    bits = [
        value.dtype.bitwidth for value in lowered.graph.inputs if is_past(str(value.name)) and value.dtype
    ]
    held = sum(tensor.nbytes for tensor in initializers(lowered))
    portable = sum(tensor.nbytes for tensor in initializers(files.graph))
    weights = [math.ceil(size * held / portable) for size in sizes]
    token = files.facts.sizes.kv_bytes_per_token if files.facts.sizes is not None else 0
    tokens = config.context_length or 0
    if any(value.name == TABLE for value in lowered.graph.inputs):
        tokens = (-(-tokens // _BLOCK) + 1) * _BLOCK
    kv = token * max(bits, default=_FLOAT_BITS) // _FLOAT_BITS * tokens
    return LayerPlace(
        name,
        int(free * own.options.get("memory_fraction", _SHARE)),
        bandwidth,
        weights,
        kv // max(1, len(sizes)),
        max(0, held - sum(weights)),
    )
