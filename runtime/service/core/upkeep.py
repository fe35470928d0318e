"""Work on the models of a running service: reload changed files, unload idle models when memory is short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import psutil

from ....errors import CarryallError
from .model_entry import ModelLoader
from .repository import ModelRepository

_log = logging.getLogger(__name__)

Scan = Callable[[], Mapping[str, Sequence[ModelLoader]]]
MEMORY_SECONDS = 2.0  # between two looks at the memory
IDLE_SECONDS = 1.0  # between two looks at idle models


def used_memory() -> int:
    """Return the resident memory of the process in bytes."""
    return int(psutil.Process().memory_info().rss)


class Upkeep:
    """Keeps the models of a service up to date and within their memory.

    Args:
        models: the models.
        scan: finds the present models of the folder; None if no folder is served.
        poll_seconds: seconds between two scans; None scans only when ``rescan`` is called.
        memory_limit: while the process uses more bytes, idle models are unloaded; None is no limit.
        memory: returns the memory in use in bytes.
    """

    def __init__(
        self,
        models: ModelRepository,
        scan: Scan | None = None,
        *,
        poll_seconds: float | None = None,
        memory_limit: int | None = None,
        memory: Callable[[], int] = used_memory,
    ) -> None:
        self._models, self._scan, self._memory = models, scan, memory
        self._poll_seconds, self._limit = poll_seconds, memory_limit
        self._scanning = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the periodic work."""
        if self._scan is not None and self._poll_seconds is not None:
            self._begin(self._poll(self._poll_seconds))
        if self._limit is not None:
            self._begin(self._watch(self._limit))
        self._begin(self._unload_idle())

    def stop(self) -> None:
        """Stop the periodic work."""
        for task in self._tasks:
            task.cancel()

    def rescan(self) -> None:
        """Look for changed models once, in a task."""
        self._begin(self.reload())

    async def reload(self) -> None:
        """Take over the present models of the folder; a folder with an error changes nothing."""
        if self._scan is None:
            return
        async with self._scanning:
            try:
                await self._models.update(await asyncio.to_thread(self._scan))
            except (CarryallError, OSError) as error:
                _log.warning("the folder of models is not reloaded: %s", error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _poll(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self.reload()

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SECONDS)
            await self._models.unload_idle()

    async def _watch(self, limit: int) -> None:
        while True:
            await asyncio.sleep(MEMORY_SECONDS)
            while self._memory() > limit and await self._models.evict_idle():
                pass
