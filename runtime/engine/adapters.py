"""The LoRA adapters of a model that requests can name."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...errors import RequestError, UnknownModelError, UsageError
from ...providers.base import RunnerInfo

if TYPE_CHECKING:
    from ...exporter.adapter import LoraAdapter

Floats = npt.NDArray[np.float32]
Adapted = Callable[[str, Floats, Floats], tuple[Floats, Floats]]


class AdapterSet:
    """LoRA adapters by name, in host memory. Thread-safe.

    A request keeps the adapter that its name stood for when the request was made.

    Args:
        info: the model; None for a model without adapters.
        adapted: returns the matrices A [rank, in] and scale * B^T [rank, out] that fit the model, given a
            module and those that fit the float model; None if they are the same.
    """

    def __init__(self, info: RunnerInfo | None = None, adapted: Adapted | None = None) -> None:
        self._info = info
        self._adapted = adapted
        self._lock = threading.Lock()
        self._adapters: dict[str, LoraAdapter] = {}
        self._paths: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters, in the order in which they were loaded."""
        return tuple(self._adapters)

    @property
    def paths(self) -> dict[str, str]:
        """The folder of each adapter, by name."""
        with self._lock:
            return dict(self._paths)

    def load(self, name: str, folder: str | Path, *, replace: bool = False) -> None:
        """Read an adapter of PEFT and check that it fits the model.

        Args:
            name: the name in requests.
            folder: ``adapter_config.json`` and ``adapter_model.safetensors``.
            replace: replace an adapter of this name; otherwise that is an error.

        Raises:
            UsageError: the model was loaded without adapters, the name is in use or not allowed, or the
                adapter is not supported; see ``read_adapter``.
            CheckpointError: a file is damaged, or a module does not fit the model.
        """
        info = self._info
        if info is None or not info.max_loras:
            raise UsageError(
                "the model was loaded without LoRA adapters; load it with max_loras of at least 1"
            )
        if not isinstance(name, str) or not name or not name.isprintable():
            raise RequestError(f"the name of an adapter must be a printable text, not {name!r}")
        if not isinstance(folder, str | Path) or not str(folder):
            raise RequestError(f"the folder of adapter '{name}' must be a path, not {folder!r}")
        self._check_free(name, replace)
        from ...exporter.adapter import (
            read_adapter,
        )  # with readers of weights, which most models do not need here

        adapter = read_adapter(Path(folder), info.lora_modules, info.max_lora_rank)
        if self._adapted is not None:
            matrices = {module: self._adapted(module, *pair) for module, pair in adapter.matrices.items()}
            adapter = dataclasses.replace(adapter, matrices=matrices)
        with self._lock:
            self._check_free(name, replace)
            self._adapters[name] = dataclasses.replace(adapter, name=name)
            self._paths[name] = str(folder)

    def unload(self, name: str) -> None:
        """Forget an adapter; requests in progress finish with it.

        Raises:
            UnknownModelError: there is no adapter of this name.
        """
        with self._lock:
            self.get(name)
            del self._adapters[name], self._paths[name]

    def get(self, name: str) -> LoraAdapter:
        """Return an adapter.

        Raises:
            UnknownModelError: there is no adapter of this name.
        """
        if not isinstance(name, str):
            raise RequestError(f"the name of an adapter must be a string, not {name!r}")
        adapter = self._adapters.get(name)
        if adapter is None:
            known = ", ".join(self._adapters) or "none"
            raise UnknownModelError(f"there is no LoRA adapter '{name}'; there are: {known}")
        return adapter

    def _check_free(self, name: str, replace: bool) -> None:
        if name in self._adapters and not replace:
            raise RequestError(f"there is a LoRA adapter '{name}' already; unload it first")
