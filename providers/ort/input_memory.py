"""Where a session reads its inputs: on the host, or in memory of its device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...errors import ProviderUnavailableError
from . import ort
from .device_memory import Device

_HOST = "Cpu"  # the name that ONNX Runtime gives to plain memory
_REMEDY = "Use --provider-option lowering=standard, which keeps caches on the host"


def device_inputs(session: Any) -> dict[str, Any]:
    """Return the inputs that a session reads in device memory, each with its ``onnxruntime.OrtMemoryInfo``.

    An input on the host that is bound for one of these is copied once, when it is bound.
    """
    names = [value.name for value in session.get_inputs()]
    places = zip(names, session.get_input_memory_infos(), strict=True)
    return {name: info for name, info in places if info.name != _HOST}


def cache_device(session: Any, caches: Iterable[str], source: str) -> Device | None:
    """Return the device that holds the inputs ``caches``, None for the host.

    Args:
        session: an opened ``onnxruntime.InferenceSession``.
        caches: names of inputs.
        source: how error messages call the model.

    Raises:
        ProviderUnavailableError: they lie in several memories, or nothing can be allocated there.
    """
    found = device_inputs(session)
    places = {name: found.get(name) for name in caches}
    names = {name: _HOST if info is None else str(info.name) for name, info in places.items()}
    if len(set(names.values())) > 1:
        name, place = next((name, place) for name, place in names.items() if place == min(names.values()))
        where = "on the host" if place == _HOST else f"in {place}"
        raise ProviderUnavailableError(
            f"input '{name}' of {source} is read {where}, other caches in {max(names.values())}. {_REMEDY}"
        )
    info = next(iter(places.values()), None)
    if info is None:
        return None
    try:
        name = Device(name="", memory=info).allocate([1], np.dtype(np.float32)).device_name()
    except ort.runtime_errors() as error:
        raise ProviderUnavailableError(
            f"{source} has caches in {info.name}, which cannot be allocated: {ort.one_line(error)}. {_REMEDY}"
        ) from error
    return Device(name=name, addressable=False, updates=False, memory=info)
