"""Split a model by layers over several providers: ``--split cpu:0-11,openvino:12-27``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CarryallError, UsageError
from ...options import declared
from ...progress import Progress
from ...providers import get_provider, has_argument
from ...providers.base import DeviceMemory, Runner, RunnerConfig
from ...providers.runners.process_runner import ProcessRunner
from ...providers.runners.split_runner import SplitRunner
from ...records import dataclass
from .lowering import lowered_model
from .model_source import SourceModel

if TYPE_CHECKING:
    from ...graph_opt.analysis.layers import LayerRange

_PART = re.compile(
    r"(?P<provider>\w+)(?P<process>@process)?(:(?P<device>[\w.]+))?:(?P<first>\d+)-(?P<last>\d+)"
)
_LAYERS = re.compile(r":\d+-\d+$")


@dataclass(frozen=True, slots=True)
class SplitPart:
    """A range of layers and where it runs.

    Args:
        provider: the name of the provider.
        layers: the range of layers.
        device: the value of the provider's option ``device``; None takes its default.
        process: whether it runs in a separate process.
    """

    provider: str
    layers: LayerRange
    device: str | None = None
    process: bool = False

    def config(self, config: RunnerConfig) -> RunnerConfig:
        """Return ``config`` with the device of this part."""
        if self.device is None:
            return config
        return with_device(config, self.provider, self.device)


def with_device(config: RunnerConfig, provider: str, device: str) -> RunnerConfig:
    """Return ``config`` with the provider's option ``device`` set.

    Raises:
        UsageError: the provider has no option ``device``, or not this device.
    """
    known = declared(get_provider(provider).options).get("device")
    if known is None:
        raise UsageError(f"provider '{provider}' has no devices to choose from; omit '{device}'")
    chosen = known.parse(device, f"provider '{provider}'")
    return dataclasses.replace(config, options={**config.options, "device": chosen})


def name_and_device(provider: str) -> tuple[str, str | None]:
    """Split ``cuda:1`` into name and device; the device of other names and of splits is None."""
    if is_split(provider) or has_argument(provider):
        return provider, None
    name, _, device = provider.partition(":")
    return name, device or None


def is_split(provider: str) -> bool:
    """Whether the value of ``provider`` is a split."""
    ranges = "," in provider or _LAYERS.search(provider) is not None
    return ranges and not has_argument(provider)


def device_memory(provider: str, config: RunnerConfig) -> list[DeviceMemory]:
    """Return the memory of the devices on which this process runs a model; empty if it is the host's.

    Args:
        provider: the name of a provider, or a split.
        config: options of every part.

    Raises:
        ProviderUnavailableError: a device does not answer.
    """
    places = [(provider, config)]
    if is_split(provider):
        parts = [_PART.fullmatch(piece.strip()) for piece in provider.split(",")]
        own = [part for part in parts if part is not None and not part["process"]]
        places = [(part["provider"], _with_own_device(config, part)) for part in own]
    found = [get_provider(name).device_memory(at.options) for name, at in places]
    return [one for one in found if one is not None]


def _with_own_device(config: RunnerConfig, part: re.Match[str]) -> RunnerConfig:
    return with_device(config, part["provider"], part["device"]) if part["device"] else config


def first_provider(split: str) -> str:
    """Return the provider's name of the first layers, or of ``split`` itself if it is not a split."""
    if not is_split(split):
        return name_and_device(split)[0]
    return split.split(",")[0].split(":")[0].removesuffix("@process")


def parse_split(text: str, num_layers: int) -> list[SplitPart]:
    """Parse ``PROVIDER[@process][:DEVICE]:FIRST-LAST,...``.

    Args:
        text: parts in the order of their layers, such as ``cpu:0-11,cuda:0:12-27``.
        num_layers: number of layers of the model; each must occur once.

    Raises:
        UsageError: the text is malformed, or layers are missing, repeated or unknown.
    """
    from ...graph_opt.analysis.layers import LayerRange

    parts = []
    for piece in text.split(","):
        match = _PART.fullmatch(piece.strip())
        if match is None:
            raise UsageError(
                f"'{piece}' is not a valid part of a split; write PROVIDER[:DEVICE]:FIRST-LAST (cpu:0-11)"
            )
        layers = LayerRange(int(match["first"]), int(match["last"]))
        parts.append(SplitPart(match["provider"], layers, match["device"], bool(match["process"])))
    expected = 0
    for part in parts:
        if part.layers.first != expected or part.layers.last < expected:
            raise UsageError(
                f"layers {part.layers.first}-{part.layers.last} do not follow layer {expected - 1}; "
                f"the parts must name layers 0 to {num_layers - 1} in order, each once"
            )
        expected = part.layers.last + 1
    if expected != num_layers:
        raise UsageError(
            f"the split names {expected} layers; the model has {num_layers} (0-{num_layers - 1})"
        )
    return parts


def split_runner(
    files: SourceModel, text: str, config: RunnerConfig, progress: Progress | None = None
) -> tuple[Runner, list[Path]]:
    """Lower each part for its provider and open it; return the runner and the lowered graphs.

    Args:
        files: a portable model.
        text: see ``parse_split``.
        config: options of every part.
        progress: called for every tensor written.

    Raises:
        UsageError: the split is invalid, or the model is already lowered.
    """
    from ...graph_opt.analysis.layers import num_layers

    parts = parse_split(text, num_layers(files.graph.graph))
    configs = [get_provider(part.provider).resolve_options(part.config(config)) for part in parts]
    graphs = [
        _lower(files, part, part_config, progress) for part, part_config in zip(parts, configs, strict=True)
    ]
    runners: list[Runner] = []
    try:
        for part, graph, part_config in zip(parts, graphs, configs, strict=True):
            runners.append(_open(part, graph, part_config))
    except CarryallError:
        _close(runners)
        raise
    return SplitRunner(runners), graphs


def _lower(files: SourceModel, part: SplitPart, config: RunnerConfig, progress: Progress | None) -> Path:
    from ...graph_opt.analysis.layers import KeepLayersPass

    provider = get_provider(part.provider)
    return lowered_model(files, provider, config, progress, changes=[KeepLayersPass(part.layers)])


def _open(part: SplitPart, graph: Path, config: RunnerConfig) -> Runner:
    if part.process:
        return ProcessRunner(part.provider, graph, config)
    return get_provider(part.provider).runner(graph, config)


def _close(runners: Sequence[Runner]) -> None:
    for runner in runners:
        runner.close()
