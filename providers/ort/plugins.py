"""Plugin libraries of ONNX Runtime: registered once in the process, and their devices.

See https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/. A library that cannot be loaded, or
has no device on this machine, gives the same error at every call.
"""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

from ...errors import ProviderUnavailableError
from . import ort

_LIBRARY_PATH = "library_path"  # what onnxruntime calls a library in the metadata of its devices
_lock = threading.Lock()
_registered: dict[Path, tuple[Any, ...]] = {}  # devices by library


def plugin_devices(library: Path) -> tuple[Any, ...]:
    """Return the ``onnxruntime.OrtEpDevice`` objects of a plugin library, which is registered if it is not.

    Raises:
        ProviderUnavailableError: it is missing, is not a plugin, or has no device on this machine.
    """
    onnxruntime = ort.load_onnxruntime(str(library))
    if not library.is_file():
        raise ProviderUnavailableError(f"there is no plugin library {library}")
    path = library.resolve()
    with _lock:
        if path not in _registered:
            _registered[path] = _devices_of(path) or _register(path)
    if not _registered[path]:
        raise ProviderUnavailableError(
            f"the plugin library {library} has no device on this machine; onnxruntime finds "
            f"{described(onnxruntime.get_ep_devices())}. Check that its hardware and driver are installed"
        )
    return _registered[path]


def packaged_library(module: str) -> Path | None:
    """Return the plugin library of a package ``onnxruntime-ep-*``; None if it is not installed.

    Raises:
        ProviderUnavailableError: the package is damaged.
    """
    try:
        return Path(importlib.import_module(module).get_library_path())
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None
    except (OSError, RuntimeError) as error:
        raise ProviderUnavailableError(f"the package {module} is damaged: {ort.one_line(error)}") from error


def described(devices: Any) -> str:
    """Return a text that lists devices."""
    return ", ".join(
        f"{device.device.type.name} ({device.device.vendor}, {device.ep_name})" for device in devices
    )


def _devices_of(library: Path) -> tuple[Any, ...]:
    """Return the devices of a library that the caller's program registered itself."""
    devices = ort.load_onnxruntime(str(library)).get_ep_devices()
    stated = [(device, device.ep_metadata.get(_LIBRARY_PATH, "")) for device in devices]
    return tuple(device for device, path in stated if path and Path(path).resolve() == library)


def _register(library: Path) -> tuple[Any, ...]:
    onnxruntime = ort.load_onnxruntime(str(library))
    before = {(device.ep_name, device.device.type) for device in onnxruntime.get_ep_devices()}
    try:
        with ort.quiet_logger():
            onnxruntime.register_execution_provider_library(str(library), str(library))
    except ort.runtime_errors() as error:
        raise ProviderUnavailableError(
            f"onnxruntime {onnxruntime.__version__} cannot load {library} as a plugin library: "
            f"{ort.one_line(error)}. Check that it is built for this version and that its libraries exist"
        ) from error
    after = onnxruntime.get_ep_devices()
    return tuple(device for device in after if (device.ep_name, device.device.type) not in before)
