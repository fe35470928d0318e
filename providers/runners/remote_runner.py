"""A runner that another thread or process holds: what it is asked is passed on by name."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base import KVEviction, Runner


class RemoteRunner(Runner):
    """A ``Runner`` whose calls about slots are carried out elsewhere, in order."""

    @abc.abstractmethod
    def _ask(self, method: str, *arguments: Any) -> Any:
        """Let the other runner carry out a method, and return its result.

        Raises:
            CarryallError: the method raised it.
            ProviderRuntimeError: the runner is closed, or has ended.
        """

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._ask("copy_prefix", source, target, length)

    def release(self, slot: int) -> None:
        self._ask("release", slot)

    def trim(self, slot: int, length: int) -> None:
        self._ask("trim", slot, length)

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        self._ask("evict_kv", slot, length, eviction)

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        parts: list[npt.NDArray[np.generic]] = self._ask("read_kv", slot, start, length)
        return parts

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        self._ask("write_kv", slot, start, length, list(parts))

    def read_state(self, slot: int, length: int) -> list[npt.NDArray[Any]]:
        parts: list[npt.NDArray[np.generic]] = self._ask("read_state", slot, length)
        return parts

    def write_state(self, slot: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        self._ask("write_state", slot, length, list(parts))
