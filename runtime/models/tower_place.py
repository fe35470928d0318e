"""What encodes pictures and sound: the decoder's provider, or another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ProviderUnavailableError, UsageError
from ...providers import get_provider
from ...providers.base import RunnerConfig
from ...records import dataclass
from ..process.threads import at_lower_priority
from .fastest import AUTO
from .layer_places import names_places
from .split import is_split, name_and_device, with_device
from .tower_graph import tower_graph


@dataclass(frozen=True, slots=True)
class TowerPlace:
    """A provider that runs ``vision.onnx``, ``text_encoder.onnx`` and ``audio.onnx``.

    Args:
        provider: the name of the provider.
        config: its options.
    """

    provider: str
    config: RunnerConfig

    def session(self, model: Path, *, quantized: bool) -> Any:
        """Lower a graph and open it; its threads let others of the process go first.

        Args:
            model: the portable graph.
            quantized: whether the model behind it has quantized weights.

        Raises:
            CarryallError: see ``tower_graph`` and ``Provider.session``.
        """
        target = get_provider(self.provider)
        graph = tower_graph(model, target, self.config, quantized=quantized)
        # Its threads have the priority of the one that opens it.
        return at_lower_priority(lambda: target.session(graph, self.config))


def check_tower(place: str) -> None:
    """Check that a provider that ``tower_provider`` names, and its device, are available.

    Raises:
        UsageError: it is no provider, or more than one.
        ProviderUnavailableError: it is not available.
    """
    if is_split(place) or names_places(place) or place == AUTO:
        raise UsageError(
            f"tower_provider '{place}' must be one provider, with a device if need be: cpu, openvino:GPU"
        )
    name, device = name_and_device(place)
    provider = get_provider(name)
    reason = provider.available()
    present = [] if reason is not None or device is None else provider.device_names()
    if present and not any(device in (each, each.split(".")[0]) for each in present):
        reason = f"there is no device '{device}', only {', '.join(present)}"
    if reason is not None:
        raise ProviderUnavailableError(f"tower_provider '{place}' is not available: {reason}")


def tower_place(place: str | None, decoder: str, config: RunnerConfig) -> TowerPlace:
    """Return what runs the encoders of a model.

    Args:
        place: the value of ``tower_provider``.
        decoder: the provider that runs the decoder.
        config: options of the decoder's runner.

    Raises:
        UsageError: the provider has no devices to choose from.
    """
    if place is None:
        return TowerPlace(decoder, config)
    name, device = name_and_device(place)
    if name != decoder:
        config = RunnerConfig(num_threads=config.num_threads, on_fallback=config.on_fallback)
    if device is not None:
        config = with_device(config, name, device)
    return TowerPlace(name, get_provider(name).resolve_options(config))
